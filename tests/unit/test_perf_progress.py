"""`ndpy perf` where one side takes longer than the other: it says that it makes progress, for as long as it takes."""

import itertools
import threading

import fake_adapter
import pytest
from fake_adapter import DEADLINE_S
from perf_ends import report_of

from ndpy.tools.cli.channel import Channel, encode
from ndpy.tools.cli.perf import client, server
from ndpy.tools.cli.perf.plan import TESTS
from ndpy.tools.cli.perf.rounds import BEAT

STEPS = 250
FAST = 10


@pytest.fixture(autouse=True)
def each_progress_is_told(monkeypatch):
    monkeypatch.setattr("ndpy.tools.cli.perf.rounds._BEAT_S", 0.0)
    monkeypatch.setattr("ndpy.tools.cli.perf.loops._TICK_NS", 0)


@pytest.fixture
def beats(monkeypatch):
    """beats[side] is how many beats this side has received while it waited for a message."""
    received = {"client": 0, "server": 0}
    receive = Channel.receive

    def counted(self, timeout_s):
        message = receive(self, timeout_s)
        received["server" if threading.current_thread() is not threading.main_thread() else "client"] += message == BEAT
        return message

    monkeypatch.setattr(Channel, "receive", counted)
    return received


def waits(monkeypatch, side):
    """An event that is set when this side has done its part and waits for the other one."""
    done = threading.Event()
    owner, name = (client.Client, "_end_bandwidth") if side == "client" else (server.ClientSession, "_wait_for_end")
    wait = getattr(owner, name)

    def tell(self, *arguments):
        done.set()
        return wait(self, *arguments)

    monkeypatch.setattr(owner, name, tell)
    return done


@pytest.mark.parametrize("test", ["write_bw", "read_bw"])
@pytest.mark.parametrize("slow", ["client", "server"])
def test_the_side_that_ends_first_hears_that_the_other_one_makes_progress(
    perf, serving, tmp_path, monkeypatch, beats, test, slow
):
    fast = "server" if slow == "client" else "client"
    done, posts = waits(monkeypatch, fast), itertools.count()
    post = fake_adapter.QueuePair._post

    def late(self, *arguments):
        if (self.adapter is serving.adapter) == (slow == "server") and next(posts) == FAST:
            assert done.wait(DEADLINE_S)
        post(self, *arguments)

    monkeypatch.setattr(fake_adapter.QueuePair, "_post", late)
    words = ["--iterations", STEPS, "--warm-up", 0, "--depth", 4, "--cq-mod", 1, "--size", 8]
    report = report_of(perf, tmp_path, test, "--bidirectional", *words)
    (result,) = report["results"]
    assert result["iterations"] == result["peer_iterations"] == STEPS
    # At least one for each four posts.
    assert beats[fast] > (STEPS - FAST) // 4 - FAST
    assert serving.wait_for(1) == ["left"]


@pytest.mark.parametrize("test", ["read_lat", "write_bw", "read_bw"])
def test_a_long_warm_up_is_progress(perf, serving, beats, test):
    shape = [] if TESTS[test].is_latency else ["--depth", 4, "--cq-mod", 1]
    perf(test, "--iterations", 1, "--warm-up", STEPS, "--size", 8, *shape)
    assert serving.wait_for(1) == ["left"]
    # The parts of a latency test grow, so there are few.
    assert beats["server"] >= (3 if TESTS[test].is_latency else STEPS // 8)


def test_a_warm_up_of_any_length_needs_no_more_memory_than_a_part(perf, monkeypatch):
    counts = []
    room = client._room
    monkeypatch.setattr("ndpy.tools.cli.perf.client._LARGEST_PART", 32)
    monkeypatch.setattr("ndpy.tools.cli.perf.client._room", lambda count: counts.append(count) or room(count))
    perf("write_lat", "--iterations", 1, "--warm-up", 1000, "--size", 8)
    assert sum(counts) == 1001
    assert max(counts) <= 32


@pytest.mark.parametrize("test", ["write_bw", "send_bw"])
def test_ctrl_c_in_both_directions_says_that_the_figures_are_of_one(perf, tmp_path, monkeypatch, test):
    shown = itertools.count()

    def interrupt(self, part):
        # By then some of its own messages have ended.
        if next(shown) == 200:
            raise KeyboardInterrupt

    monkeypatch.setattr("ndpy.tools.cli.perf.report.Bar.show", interrupt)
    files = ["--json", tmp_path / "out.json", "--csv", tmp_path / "out.csv"]
    output = perf(test, "--bidirectional", "--duration", 20, "--size", 8, *files, status=130)
    assert "8 bytes: interrupted; the figures are of this side's direction only, not the sum of both" in output
    assert '"one_direction": true' in (tmp_path / "out.json").read_text()
    assert (tmp_path / "out.csv").read_text().splitlines()[0].endswith(",one_direction")


def test_ctrl_c_in_one_direction_says_nothing_of_directions(perf, monkeypatch):
    def interrupt(self, part):
        raise KeyboardInterrupt

    monkeypatch.setattr("ndpy.tools.cli.perf.report.Bar.show", interrupt)
    assert "direction" not in perf("write_bw", "--duration", 20, "--size", 8, status=130)


@pytest.mark.parametrize("exposed", [b"", bytes(19), bytes(40), None, 7])
def test_a_server_whose_memory_makes_no_sense_is_told(perf, monkeypatch, exposed):
    said = encode(exposed) if isinstance(exposed, bytes) else exposed

    def share(self, arguments):
        return {"exposed": said}

    monkeypatch.setattr(server.ClientSession, "_share", share)
    output = perf("write_bw", "--iterations", 4, "--warm-up", 0, "--size", 8, status=1)
    assert "exposed" in output.splitlines()[-1]
    assert "Traceback" not in output


@pytest.mark.parametrize("test", ["write_lat", "write_bw"])
def test_what_a_server_finds_wrong_cannot_steer_the_terminal(perf, monkeypatch, test):
    monkeypatch.setattr(server.End, "check", lambda *arguments, **options: "\x1b[2J\x07" + "x" * 5000)
    output = perf(test, "--iterations", 4, "--warm-up", 0, "--size", 8, status=1)
    assert "?[2J?" in output
    assert "\x1b" not in output
    assert len(output) < 1500
