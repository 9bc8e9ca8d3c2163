"""The counters of ports, from a folder in place of the kernel's, and what the commands say about them."""

from __future__ import annotations

import json
import threading
import time

import pytest
from click.testing import CliRunner
from faked_machine import make_info
from kit import linux_only as linux_only
from kit.helpers import interrupted

from ndpy.platforms.verbs.counters import read_counters
from ndpy.tools.cli import counters, main
from ndpy.tools.cli.smoke.report import Run
from ndpy.vocabulary import system_files
from ndpy.vocabulary.counters import changes, is_error, is_loss

# Of rxe, mlx5 and the specification.
ERRORS = [
    "duplicate_request",
    "out_of_seq_request",
    "rcvd_rnr_err",
    "retry_exceeded_err",
    "send_err",
    "link_downed",
    "symbol_error",
    "port_rcv_errors",
    "port_xmit_discards",
    "VL15_dropped",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "link_error_recovery",
    "packet_seq_err",
    "local_ack_timeout_err",
    "out_of_buffer",
    "out_of_sequence",
    "implied_nak_seq_err",
    "rx_icrc_encapsulated_errors",
    "roce_adp_retrans",
    "np_cnp_sent",
]
OTHERS = [
    "sent_pkts",
    "rcvd_pkts",
    "rdma_sends",
    "rdma_recvs",
    "ack_deferred",
    "port_xmit_data",
    "port_rcv_packets",
    "unicast_xmit_packets",
    "rx_write_requests",
    "rx_atomic_requests",
]


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """fake0 with two ports, one of them with both folders."""
    monkeypatch.setattr(system_files, "_root", tmp_path)
    devices = tmp_path / "sys/class/infiniband"
    for port, folder, values in (
        (1, "counters", {"port_xmit_data": 100, "symbol_error": 0, "absent": "N/A (no PMA)"}),
        (1, "hw_counters", {"lifespan": 12, "duplicate_request": 3}),
        (10, "hw_counters", {"rdma_sends": 7}),
    ):
        place = devices / "fake0/ports" / str(port) / folder
        place.mkdir(parents=True)
        for name, value in values.items():
            (place / name).write_text(f"{value}\n")
    return devices


@pytest.fixture
def fake0(monkeypatch):
    monkeypatch.setattr("ndpy.tools.cli.devices.find", lambda name: make_info(name="fake0"))


def add(sysfs, by, name="duplicate_request"):
    path = sysfs / "fake0/ports/1/hw_counters" / name
    path.write_text(f"{int(path.read_text()) + by}\n")


def invoke(*words):
    return CliRunner().invoke(main, ["devices", "fake0", *words])


@pytest.mark.parametrize("name", ERRORS)
def test_these_are_errors(name):
    assert is_error(name)


@pytest.mark.parametrize("name", OTHERS)
def test_these_are_none(name):
    assert not is_error(name)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("symbol_error", True),
        ("port_rcv_errors", True),
        ("port_xmit_discards", True),
        ("link_downed", True),
        ("packet_seq_err", True),
        ("out_of_sequence", True),
        ("rx_icrc_encapsulated", True),
        ("local_ack_timeout_err", True),
        ("rcvd_seq_err", True),
        ("completer_retry_err", True),
        ("tcpRetransSegs", True),
        ("excessive_buffer_overrun_errors", True),
        ("rnr_nak_retry_err", False),
        ("retry_rnr_exceeded_err", False),
        ("out_of_buffer", False),
        ("np_ecn_marked_roce_packets", False),
        ("rp_cnp_handled", False),
        ("roce_slow_restart_cnps", False),
        ("req_cqe_flush_error", False),
        ("resp_remote_access_errors", False),
        ("resp_local_length_error", False),
        ("VL15_dropped", False),
        ("port_rcv_remote_physical_errors", False),
        ("port_xmit_data", False),
    ],
)
def test_losses_are_what_a_bad_cable_causes(name, loss):
    assert is_loss(name) is loss


def test_all_that_can_be_read_is_there(sysfs):
    assert read_counters("fake0") == {
        1: {"port_xmit_data": 100, "symbol_error": 0, "duplicate_request": 3},
        10: {"rdma_sends": 7},
    }
    assert read_counters("other") == {}


def test_changes_are_what_differs():
    before = {1: {"a": 1, "b": 2}, 2: {"a": 5}}
    after = {1: {"a": 1, "b": 5, "c": 1}, 2: {"a": 4}}
    assert changes(before, after) == {1: {"b": 3, "c": 1}, 2: {"a": -1}}


def test_the_command_shows_all_counters_errors_first(sysfs, fake0):
    lines = invoke("--counters").output.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["fake0/1", "duplicate_request", "3"],
        ["fake0/1", "symbol_error", "0"],
        ["fake0/1", "port_xmit_data", "100"],
        ["fake0/10", "rdma_sends", "7"],
    ]
    assert [line.endswith("error") for line in lines] == [True, False, False, False]
    assert json.loads(invoke("--counters", "--json").output) == {
        "fake0": {"1": {"port_xmit_data": 100, "symbol_error": 0, "duplicate_request": 3}, "10": {"rdma_sends": 7}}
    }


def test_an_adapter_without_counters_says_so(tmp_path, monkeypatch, fake0):
    monkeypatch.setattr(system_files, "_root", tmp_path)
    assert invoke("--counters").output == "fake0: its driver has no counters\n"


def test_watching_shows_changes_with_their_rates(sysfs, fake0):
    def work():
        time.sleep(0.6)
        add(sysfs, 50)
        path = sysfs / "fake0/ports/1/counters/port_xmit_data"
        path.write_text("1000000100\n")

    worker = threading.Thread(target=work)
    worker.start()
    output = invoke("--watch", "1", "--count", "2").output.splitlines()
    worker.join()
    assert [line.split()[1:6] for line in output[1:3]] == [
        ["duplicate_request", "+50", "50.0", "a", "second"],
        ["port_xmit_data", "+1000000000", "1000000000.0", "a", "second"],
    ]
    assert output[1].endswith("error")
    assert output[2].endswith("32.000 Gbit/s")
    assert output[3].endswith("no change")
    assert len(output) == 4


def test_a_rate_is_by_the_second(monkeypatch, capsys):
    """Whatever the time between two readings is."""
    readings = iter([{"fake0": {1: {"frames": count, "port_xmit_data": count}}} for count in (10, 60, 61)])
    monkeypatch.setattr(counters, "_read", lambda names: next(readings))
    monkeypatch.setattr(counters.time, "sleep", lambda seconds: None)
    counters.watch(["fake0"], 4.0, 2, False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "fake0" in line]
    assert [row[1:5] for row in rows] == [
        ["frames", "+50", "12.5", "a"],
        ["port_xmit_data", "+50", "12.5", "a"],
        ["frames", "+1", "0.2", "a"],
        ["port_xmit_data", "+1", "0.2", "a"],
    ]


def test_watching_as_json_has_a_line_for_each_time(sysfs, fake0):
    lines = [json.loads(line) for line in invoke("--watch", "0.1", "--count", "3", "--json").output.splitlines()]
    assert [line["seconds"] for line in lines] == [0.1] * 3
    assert [line["changes"] for line in lines] == [{"fake0": {"1": {}, "10": {}}}] * 3


def test_ctrl_c_ends_watching_without_a_message(sysfs, fake0, monkeypatch):
    monkeypatch.setattr(time, "sleep", interrupted)
    result = invoke("--watch", "1")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("words", [["--watch", "0"], ["--count", "1"], ["--watch", "1", "--count", "0"]])
def test_wrong_numbers_are_refused(sysfs, fake0, words):
    assert invoke(*words).exit_code == 2


def test_the_smoke_test_tells_what_it_did_to_the_counters():
    run = Run("fake0", "verbs")
    assert run.errors_counted() == ""
    run.counters = {1: {"rdma_sends": 5}}
    assert run.errors_counted() == "smoke: the adapter counted no errors"
    run.counters = {1: {"rdma_sends": 5, "duplicate_request": 2}}
    assert run.errors_counted() == "smoke: the adapter counted errors: duplicate_request +2"
    run.counters = {1: {"duplicate_request": 2}, 2: {"send_err": 1}}
    assert run.errors_counted().endswith("duplicate_request +2 on port 1, send_err +1 on port 2")
    assert run.to_dict()["counters"] == run.counters
