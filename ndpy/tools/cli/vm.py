"""`ndpy vm`: commands that run where there is an adapter, if necessary in a VM."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType

import click

from ndpy.tools.cli.numbers import Number
from ndpy.tools.machines import SetupError, links, vm
from ndpy.tools.machines import run as runner
from ndpy.tools.output import STDOUT, output_option


@click.group(short_help="Run commands where there is an adapter, if necessary in a VM.")
def command() -> None:
    """Run commands on Linux machines without RDMA hardware."""


def _forwards(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[vm.Forward, ...]:
    forwards = []
    for value in values:
        ports = [int(word) if word.isascii() and word.isdigit() else 0 for word in value.split(":")]
        if len(ports) != 2 or not all(0 < port < 65536 for port in ports):
            raise click.BadParameter(f"{value!r} is not HOST_PORT:VM_PORT")
        forwards.append(vm.Forward(*ports))
    return tuple(forwards)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--vm", "force_vm", is_flag=True, help="Use the VM even if this machine has an adapter.")
@click.option(
    "--adapter",
    type=click.Choice(["rxe", "siw"]),
    help="The kind of adapter to provide. Default: rxe, and siw in a VM whose kernel has it.",
)
@click.option(
    "--limit",
    type=Number(0),
    default=1800.0,
    show_default=True,
    metavar="SECONDS",
    help="End the command after this time.",
)
@click.option("--cpus", default=2, show_default=True, help="Number of processors of the VM.")
@click.option("--memory", default="2G", show_default=True, help="Memory size of the VM.")
@click.option(
    "--kernel", metavar="VERSION", help="Kernel of the VM. Default: the newest one with the module for --adapter."
)
@click.option(
    "--kernel-root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Look for kernels in this folder instead of /. Their packages were unpacked there, and depmod was run.",
)
@click.option(
    "--icount",
    is_flag=True,
    help="Use a VM with one processor whose clock counts instructions, for repeatable timings.",
)
@click.option(
    "--kvm/--no-kvm",
    default=True,
    help="Whether the VM may use KVM if it works here. The first run finds out, in at most 3 s.",
)
@click.option(
    "--network",
    is_flag=True,
    help="Use a VM that reaches this machine's loopback interface at 10.0.2.2, with the adapter siw1 on that network.",
)
@click.option(
    "--forward",
    "forwards",
    callback=_forwards,
    multiple=True,
    metavar="HOST_PORT:VM_PORT",
    help="Forward a TCP port of this machine's loopback interface to a port of 10.0.2.15 in the VM. Implies --network.",
)
@click.option(
    "--hosts",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="2: run COMMAND in each of two VMs with a network between them.",
)
@output_option("keep-log", "Write the kernel log to FILE (with --hosts 2: FILE.1 and FILE.2).")
@click.argument("words", nargs=-1, required=True, metavar="[--] COMMAND...")
def run(
    force_vm: bool,
    adapter: str | None,
    limit: float,
    cpus: int,
    memory: str,
    kernel: str | None,
    kernel_root: Path | None,
    icount: bool,
    kvm: bool,
    network: bool,
    forwards: tuple[vm.Forward, ...],
    hosts: int,
    keep_log_file: Path | None,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND in a place that has an RDMA adapter.

    The first possible choice of these is taken:

    \b
      1. This machine, if it has an adapter.
      2. This machine with an rxe adapter that is removed afterwards. This
         needs root and a kernel with the module rdma_rxe.
      3. A small VM with the adapter rxe0 (192.0.2.1, 2001:db8::1) and, if its
         kernel has siw, siw0 (198.51.100.1, 2001:db8:1::1).

    The VM sees the files of this machine. Files that it writes to the Git checkout around the working folder are kept.
    Without a checkout, files that it writes to the working folder are kept.

    With --hosts 2 the adapter, rxe0 or siw0, is on an Ethernet between the two VMs, with MTU 4200. COMMAND begins when
    both have booted, and each line of output begins with the number of its host. In the environment:

    \b
      NDPY_HOST                  1 or 2
      NDPY_ADDRESS               this host's address on that Ethernet (netdev wire0)
      NDPY_PEER_ADDRESS          the other host's
      NDPY_CONTROL_ADDRESS       this host's address on a second network (wire1),
                                 which remains when a test disturbs the first
      NDPY_PEER_CONTROL_ADDRESS  the other host's
      NDPY_KILL                  write a line to this file to cut the other
                                 host's power

    When COMMAND has failed on one host, the other one has 30 s to end. A host whose power was cut does not count.

    The exit status is that of COMMAND (of the first host on which it failed), or one of these:

    \b
      123  COMMAND succeeded, but the kernel log shows a bug.
      124  COMMAND did not finish in time.
      125  No adapter could be provided, or the VM broke.
    """
    if hosts > 1 and keep_log_file == STDOUT:
        raise click.UsageError("--hosts keeps a log of each host. Give --keep-log a name")
    if hosts > 1 and (network or forwards or icount):
        raise click.UsageError("--hosts cannot be used together with --network, --forward or --icount")
    network = network or bool(forwards)
    if hosts > 1:
        adapter = adapter or "rxe"
    adapters = (adapter,) if adapter else ("rxe", "siw")
    root = Path("/") if kernel_root is None else kernel_root.resolve()
    machine = vm.Machine(cpus, memory, kernel, root, adapters, icount, kvm, forwards if network else None)
    force_vm = force_vm or icount or network or kernel is not None or kernel_root is not None
    # `ndpy vm run` is the same command.
    group = click.get_current_context().command_path.split()[-2]

    def say(text: str) -> None:
        for line in text.splitlines():
            click.echo(f"{group}: {line}", err=True)

    request = runner.Request(words, limit, force_vm, adapter, machine, keep_log_file, hosts)
    try:
        links.require_linux()
        signal.signal(signal.SIGTERM, _terminated)
        signal.signal(signal.SIGHUP, _terminated)
        status = runner.run(request, say)
    except SetupError as error:
        say(str(error))
        status = runner.EXIT_SETUP
    except KeyboardInterrupt:
        say("interrupted")
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    sys.exit(status)
