"""The real `ndpy smoke` and `ndpy devices` on the adapter."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner
from kit.helpers import only_under_stress

import ndpy
from ndpy.tools.cli import main
from ndpy.tools.cli.smoke import catalog

pytestmark = pytest.mark.timeout(240)
SUMMARY = re.compile(r"smoke: (\d+) passed, (\d+) failed, (\d+) known, (\d+) skipped on (\S+) \((\w+)(?:, software)?\)")


def ndpy_command(*words):
    return [sys.executable, "-m", "ndpy", *words]


def smoke(*words, timeout=200):
    return subprocess.run(ndpy_command("smoke", *words), capture_output=True, text=True, timeout=timeout)


@contextlib.contextmanager
def started(*words):
    """Start a smoke command. It is ended at the end of the block, whatever happens."""
    process = subprocess.Popen(
        ndpy_command("smoke", *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        process.stdout.close()


def first_child(process, timeout_s=60):
    """The peer process of a running smoke test, once it exists."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        children = psutil.Process(process.pid).children()
        if children:
            return children[0]
        time.sleep(0.05)
    raise AssertionError("no peer process came up")


def until(process, word):
    """Read lines up to the one that contains this word."""
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"{word!r} never came")


def test_smoke_passes_and_says_so(adapter_name, tmp_path):
    done = smoke(adapter_name, "--json", str(tmp_path / "out.json"), "--junit", str(tmp_path / "out.xml"))
    assert done.returncode == 0, done.stdout + done.stderr
    passed, failed, known, skipped, name, provider = SUMMARY.fullmatch(done.stdout.splitlines()[-1]).groups()
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["summary"] == {"pass": int(passed), "fail": 0, "known": int(known), "skip": int(skipped)}
    assert (int(failed), name, provider) == (0, adapter_name, "verbs")
    assert all(check["reason"] for check in report["checks"])
    assert (tmp_path / "out.xml").read_text().startswith("<?xml")
    claimed = set(report["capabilities"])
    for check in report["checks"]:
        if check["group"] == "windows":
            assert (check["verdict"] == "SKIP") == ("MEMORY_WINDOWS" not in claimed), check


def test_smoke_of_an_absent_adapter_fails_naming_those_that_are_there(adapter_name):
    done = smoke("absent9")
    assert done.returncode == 1
    assert adapter_name in done.stdout
    assert done.stdout.splitlines()[-1] == "smoke: 0 passed, 1 failed, 0 known, 0 skipped on absent9 (no provider)"


def test_a_killed_peer_is_reported_and_the_other_checks_go_on(adapter_name):
    with started(adapter_name, "--only", "notification") as process:
        until(process, "notification/wait")
        first_child(process).kill()
        output = process.stdout.read()
        assert process.wait(120) == 1
    lines = output.splitlines()
    assert any("was killed by signal 9" in line for line in lines), output
    assert any(line.startswith("PASS") and "notification/poller" in line for line in lines), output
    assert SUMMARY.fullmatch(lines[-1]).group(2) == "1", output


def test_a_peer_that_is_not_there_fails_once_and_ends_the_run(adapter_name):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = smoke(adapter_name, "--peer", f"127.0.0.1:{port}", "--json", "-")
    assert done.returncode == 1
    assert done.stderr.count(f"no peer at 127.0.0.1:{port}") == 1
    assert re.search(r"^smoke: \d\d more checks are not run without a peer$", done.stderr, re.MULTILINE)
    assert SUMMARY.fullmatch(done.stderr.splitlines()[-1]).group(2) == "1"
    found = json.loads(done.stdout)
    assert len(found["checks"]) + len(found["not_run"]) > 80


def test_what_a_check_leaves_open_is_in_the_reports(adapter_name, tmp_path, monkeypatch):
    """Its check fails, and so does closing the adapter. The reports of all other checks are not lost."""
    queues = []

    def leave_open(testbed):
        queue = testbed.adapter.create_completion_queue(4)
        queues.append(queue)
        monkeypatch.setattr(queue, "_refuse_if_used", refuse)
        testbed.close_afterwards(queue)
        return ""

    def refuse():
        raise ndpy.DeviceBusyError("a thread waits on the queue and does not leave", operation="close")

    checks = [
        catalog.Check("load", "leaves", "it leaves something open", (), leave_open),
        catalog.Check("load", "works", "it works", (), lambda testbed: "fine"),
    ]
    monkeypatch.setattr(catalog, "load", lambda groups: checks)
    try:
        report, junit = tmp_path / "out.json", tmp_path / "out.xml"
        done = CliRunner().invoke(main, ["smoke", adapter_name, "--json", str(report), "--junit", str(junit)])
        assert done.exit_code == 1, done.output
        found = {check["name"]: check for check in json.loads(report.read_text())["checks"]}
        assert {name: check["verdict"] for name, check in found.items()} == {
            "leaves": "FAIL",
            "works": "PASS",
            "close": "FAIL",
        }
        assert "a thread waits on the queue" in found["leaves"]["reason"]
        assert "CompletionQueue of depth 4" in found["close"]["reason"]
        assert 'failures="2"' in junit.read_text()
    finally:
        monkeypatch.undo()
        for queue in queues:
            queue.close()
            queue.adapter.close()


@only_under_stress
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_smoke_test_ends_both_processes(adapter_name, number):
    with started(adapter_name, "--only", "disconnect", "--only", "notification") as process:
        peer = first_child(process)
        until(process, "PASS")
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(30) == 130, output
        peer.wait(30)
    assert "interrupted" in output
    assert SUMMARY.fullmatch(output.splitlines()[-1]), output


@only_under_stress
def test_a_peer_elsewhere_serves_one_client_after_the_other(adapter_name):
    with ndpy.open_adapter(adapter_name) as adapter:
        addresses = [address for address in adapter.info.addresses if ":" not in address]
    if not addresses:
        pytest.skip(f"{adapter_name} has no IPv4 address")
    with started(adapter_name, "--serve", "--listen", f"{addresses[0]}:0") as server:
        port = int(re.search(r":(\d+)\. ", until(server, "serving")).group(1))
        for nonsense in (
            b"nonsense\n",
            b'{"command": "exec"}\n',
            b'{"command": "hello", "protocol": 0}\n',
            b"x" * 20000,
        ):
            with socket.create_connection((addresses[0], port), timeout=10) as client, contextlib.suppress(OSError):
                client.sendall(nonsense)
                while client.recv(4096):
                    pass
        done = smoke(adapter_name, "--peer", f"{addresses[0]}:{port}", "--only", "connect")
        assert done.returncode == 0, done.stdout + done.stderr
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0


def test_devices_lists_the_adapter(adapter_name):
    done = subprocess.run(ndpy_command("devices", "-v", adapter_name), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert adapter_name in done.stdout
    assert "max_registration_size" in done.stdout
    assert "GID" in done.stdout
    as_json = subprocess.run(ndpy_command("devices", "--json"), capture_output=True, text=True, timeout=60)
    assert adapter_name in [info["name"] for info in json.loads(as_json.stdout)]
