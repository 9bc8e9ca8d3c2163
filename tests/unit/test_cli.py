"""The command line without an adapter."""

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from faked_machine import make_info

import ndpy
from ndpy.tools.cli import main
from ndpy.vocabulary import system_files
from ndpy.vocabulary.placement import parse_cpu_list, placement_warning


def invoke(*words):
    return CliRunner().invoke(main, words)


def test_subcommands_are_listed():
    output = invoke("--help").output
    assert all(name in output for name in ("devices", "doctor", "perf", "smoke", "softroce", "vm"))
    # Each is described by a whole sentence.
    assert "..." not in output.partition("Commands:")[2]


def test_devices_without_an_adapter_says_why_and_fails(no_adapter):
    result = invoke("devices")
    assert result.exit_code == 1
    assert "no RDMA adapter" in result.output


def test_devices_as_json_is_json_even_then(no_adapter):
    result = invoke("devices", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == []


def test_smoke_without_an_adapter_fails_with_reports_all_the_same(no_adapter, tmp_path):
    result = invoke("smoke", "--json", str(tmp_path / "out.json"), "--junit", str(tmp_path / "out.xml"))
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "smoke: 0 passed, 1 failed, 0 known, 0 skipped on no adapter (no provider)"
    assert "AdapterNotFoundError" in json.loads((tmp_path / "out.json").read_text())["checks"][0]["reason"]
    assert (tmp_path / "out.xml").exists()


def test_smoke_serve_without_an_adapter_fails(no_adapter):
    result = invoke("smoke", "--serve")
    assert result.exit_code == 1
    assert "no RDMA adapter" in result.output


def test_smoke_list_needs_no_adapter(no_adapter):
    result = invoke("smoke", "--list", "--only", "windows")
    assert result.exit_code == 0
    assert "windows/write-past-end" in result.output
    assert "connect/" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "nonsense"],
        ["--listen", "192.0.2.1"],
        ["--serve", "--peer", "192.0.2.1"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
    ],
)
def test_wrong_usage_ends_with_status_2(words):
    assert invoke("smoke", *words).exit_code == 2


def options_of_numbers(command=main, words=()):
    """All options of all commands whose value is a number that may have a fraction: what is typed, and its
    parameter.
    """
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from options_of_numbers(command.get_command(context, name), (*words, name))
    for parameter in command.params:
        if isinstance(parameter.type, click.types.FloatParamType):
            yield " ".join((*words, parameter.opts[0])), parameter


OPTIONS_OF_NUMBERS = dict(options_of_numbers())


def test_the_options_of_numbers_are_found():
    assert {"devices --watch", "smoke --timeout", "perf --timeout", "perf --duration", "vm run --limit"} < set(
        OPTIONS_OF_NUMBERS
    )


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "1e999", "-inf"])
@pytest.mark.parametrize("option", OPTIONS_OF_NUMBERS)
def test_a_number_that_is_not_finite_is_refused(option, text):
    parameter = OPTIONS_OF_NUMBERS[option]
    with pytest.raises(click.BadParameter, match=r"is not a finite number|is not in the range"):
        parameter.type(text, parameter)


def test_cpu_lists():
    assert parse_cpu_list("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cpu_list("\n") == set()


@pytest.fixture
def nodes(tmp_path):
    """A machine whose node 0 has no processor that a process may use. Node 1 has all of them."""
    folder = tmp_path / "sys/devices/system/node"
    for node, processors in ((0, "100000-100001"), (1, "0-9999")):
        (folder / f"node{node}").mkdir(parents=True)
        (folder / f"node{node}" / "cpulist").write_text(processors + "\n")
    with system_files.below(tmp_path):
        yield


def test_a_process_on_another_node_is_warned(nodes):
    warning = placement_warning(make_info(numa_node=0))
    assert "NUMA node 0" in warning
    assert "numactl --cpunodebind=0" in warning


@pytest.mark.parametrize("node", [None, 1, 7])
def test_no_warning_without_a_reason(nodes, node):
    assert placement_warning(make_info(numa_node=node)) == ""


def test_the_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "ndpy", "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert ndpy.__version__ in done.stdout
