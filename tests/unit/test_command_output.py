"""Where the commands write, on which terminals, and how Ctrl-C ends them. Without an adapter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from faked_machine import make_info
from kit.deadlines import DEADLINE_S
from kit.helpers import interrupted

import ndpy
from ndpy.tools import doctor
from ndpy.tools.cli import main
from ndpy.tools.cli.perf import report as perf_report
from ndpy.tools.cli.perf.figures import Distribution, Latency
from ndpy.tools.doctor import findings

ADDRESSES = ("192.168.100.200", "fd00:1234:5678:9abc:def0:1234:5678:9abc")
REPORTS = [
    (command, option)
    for command, options in (("smoke", ["--json", "--junit"]), ("perf write_lat", ["--json", "--csv"]))
    for option in options
]


def invoke(*words, charset="utf-8"):
    return CliRunner(charset=charset).invoke(main, words)


def on_a_terminal(monkeypatch, columns):
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(columns), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# ---- reports ----


@pytest.mark.parametrize(("command", "option"), REPORTS)
def test_a_dash_is_standard_output_and_all_else_goes_to_standard_error(
    no_adapter, tmp_path, monkeypatch, command, option
):
    monkeypatch.chdir(tmp_path)
    result = invoke(*command.split(), option, "-")
    assert result.exit_code == 1
    if option == "--json":
        assert "no RDMA adapter" in json.dumps(json.loads(result.stdout))
    elif option == "--junit":
        assert ElementTree.fromstring(result.stdout).find("testsuite") is not None
    else:
        assert result.stdout.splitlines() == ["bytes"]
    assert "AdapterNotFoundError" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["smoke --json - --junit -", "perf write_lat --json - --csv -"])
def test_only_one_report_goes_to_standard_output(no_adapter, words):
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "only one report can go to standard output" in result.stderr


@pytest.mark.parametrize("command", ["devices", "doctor"])
def test_commands_that_print_json_take_a_dash_too(no_adapter, monkeypatch, command):
    monkeypatch.setattr(doctor, "diagnose", lambda adapter: [findings.passed("libraries", str(adapter))])
    with_dash, without = invoke(command, "--json", "-"), invoke(command, "--json")
    assert with_dash.stdout == without.stdout
    assert isinstance(json.loads(with_dash.stdout), list)


@pytest.mark.parametrize(("command", "option"), [*REPORTS, ("perf write_lat", "--plot"), ("vm run", "--keep-log")])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("absent/report.png", "there is no folder"),
        ("/proc/report.png", "No such file"),
        ("taken.png", "is a directory"),
        ("loop.png", "cannot write"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_before_the_run(monkeypatch, tmp_path, command, option, place, said):
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    monkeypatch.setattr(ndpy, "open_adapter", lambda which: pytest.fail("the run began"))
    monkeypatch.setattr("ndpy.tools.machines.run.run", lambda request, say: pytest.fail("the run began"))
    rest = ["true"] if command == "vm run" else []
    result = invoke(*command.split(), option, str(tmp_path / place), *rest)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split()) and place.rpartition("/")[2] in result.stderr


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(no_adapter, tmp_path):
    former, new, link = tmp_path / "former", tmp_path / "new", tmp_path / "link"
    former.write_text("former results")
    link.symlink_to(new)
    for path in (former, new, link):
        assert invoke("smoke", "--json", str(path), "--only", "nonsense").exit_code == 2
    assert former.read_text() == "former results"
    assert link.is_symlink() and not new.exists()


def test_looking_whether_a_pipe_can_be_written_does_not_wait_for_its_reader(no_adapter, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert invoke("smoke", "--json", str(tmp_path / "pipe"), "--only", "nonsense").exit_code == 2


# ---- terminals ----


def adapter_info():
    words = dict.fromkeys(("provider", "transport", "driver", "firmware", "netdev", "state"), "something-long")
    return make_info(**words, addresses=ADDRESSES)


@pytest.mark.parametrize("columns", [20, 40, 79, 120])
def test_devices_never_splits_an_address(no_adapter, monkeypatch, columns):
    monkeypatch.setattr("ndpy.list_adapters", lambda **_: [adapter_info()])
    on_a_terminal(monkeypatch, columns)
    output = plain(invoke("devices").output)
    assert all(address in output for address in ADDRESSES)
    assert [line for line in output.splitlines() if "something-long" in line]


@pytest.mark.parametrize("columns", [30, 60, 200])
def test_perf_never_cuts_a_figure(monkeypatch, capsys, columns):
    on_a_terminal(monkeypatch, columns)
    times = Distribution(1)
    times.add([123456789, 234567891] * 20000)
    perf_report.show(perf_report.Run("write_lat", "rxe0", results=[Latency(2, times)]), histogram=False)
    output = plain(capsys.readouterr().out)
    assert all(figure in output for figure in ("123456.79", "234567.89", "99.99 %", "iterations", "40000"))
    assert "\u2026" not in output


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_the_doctor_breaks_lines_between_words(monkeypatch, columns):
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    found = [findings.warned("memory control group", f"soft limit near {ADDRESSES[1]}", "raise the limit")]
    monkeypatch.setattr(doctor, "diagnose", lambda adapter: found)
    on_a_terminal(monkeypatch, columns)
    output = plain(invoke("doctor").output)
    assert all(word in output for word in ("WARN", "memory control group", "remedy: raise the limit"))
    assert columns == 40 or ADDRESSES[1] in output


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "cp437"])
def test_smoke_runs_on_a_terminal_of_another_encoding(no_adapter, monkeypatch, charset):
    on_a_terminal(monkeypatch, 100)
    result = invoke("smoke", "r\u00e9seau\u20260", charset=charset)
    assert result.exit_code == 1, result.exception
    assert "1 failed" in result.output and "AdapterNotFoundError" in result.output


def test_what_standard_output_cannot_encode_is_escaped(monkeypatch):
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    monkeypatch.setattr(doctor, "diagnose", lambda adapter: [findings.passed("carte r\u00e9seau", "\u2713")])
    result = invoke("doctor", charset="ascii")
    assert result.exit_code == 0, result.exception
    assert r"carte r\xe9seau" in result.output and r"\u2713" in result.output


# ---- Ctrl-C ----


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("doctor", "ndpy.tools.doctor.diagnose"),
        ("devices", "ndpy.list_adapters"),
        ("devices --counters", "ndpy.tools.cli.devices.show"),
        ("smoke --list", "ndpy.tools.cli.smoke.catalog.load"),
        ("smoke", "ndpy.open_adapter"),
        ("perf write_lat", "ndpy.open_adapter"),
        ("soft path", "ndpy.platforms.verbs.softverbs.folder"),
        ("softnd path", "ndpy.platforms.networkdirect.softnd_installation.find"),
        ("softroce up", "ndpy.tools.machines.links.require_linux"),
        ("softroce down", "ndpy.tools.machines.links.require_linux"),
        ("vm run true", "ndpy.tools.machines.run.run"),
    ],
)
def test_ctrl_c_ends_every_command_with_130(monkeypatch, words, place):
    monkeypatch.setattr("ndpy.list_adapters", lambda **_: [adapter_info()])
    monkeypatch.setattr(place, interrupted)
    result = invoke(*words.split())
    assert result.exit_code == 130
    assert "interrupted" in result.stderr and "Aborted" not in result.stderr


def test_ctrl_c_ends_the_process_that_examines_too(monkeypatch, tmp_path):
    started = []

    class Interrupted(subprocess.Popen):
        def communicate(self, *words, **named):
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(findings.subprocess, "Popen", Interrupted)
    # It would wait for ever.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "waits.py").write_text("import signal\n\ndef examine():\n    signal.pause()\n")
    with pytest.raises(KeyboardInterrupt):
        findings.examine_apart("something", "waits", "examine")
    (process,) = started
    assert process.wait(DEADLINE_S) != 0


# ---- names ----


@pytest.mark.parametrize("wrong", ["Soft0", "soft", "soft-0"])
def test_a_name_that_is_nearly_right_gets_the_right_one(no_adapter, monkeypatch, wrong):
    monkeypatch.setattr("ndpy.platforms.list_adapters", lambda **_: [adapter_info()])
    with pytest.raises(ndpy.AdapterNotFoundError, match=f"no adapter '{wrong}' \\(did you mean soft0\\?\\)"):
        ndpy.open_adapter(wrong)
    with pytest.raises(ndpy.AdapterNotFoundError, match=r"no adapter 'MLX5_0' \(did you mean mlx5_0\?\); there is"):
        ndpy.open_adapter("MLX5_0")
    with pytest.raises(ndpy.AdapterNotFoundError, match=r"no adapter 'eth7'; there is"):
        ndpy.open_adapter("eth7")


def test_without_any_adapter_soft0_is_meant_too(no_adapter):
    with pytest.raises(ndpy.AdapterNotFoundError, match=r"'Soft0' \(did you mean soft0\?\): this machine has no"):
        ndpy.open_adapter("Soft0")
