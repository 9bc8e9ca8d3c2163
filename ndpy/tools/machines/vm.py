"""Runs a command in a small VM that has software adapters.

virtme-ng boots a distribution kernel with this machine's file system as its root. So the command finds the same
programs at the same paths. Two facts shape this module:

- The VM's serial console loses and garbles output under load. virtme-ng gives QEMU this process's own standard streams,
  whose last bytes can be lost when the VM ends. So the command's output, the kernel log and the exit status use four
  virtio ports. Each is a Unix socket on this machine. A write in the VM returns before QEMU has passed the bytes on.
  So each stream ends with a random mark, and the VM runs until all marks have arrived. The kernel log has a random name
  of its own for this run, so that a command that prints the log does not end its output.
- A shutdown inside the VM can hang for ever on an adapter that is still in use. So the VM is ended from outside.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from ndpy.tools.machines import SetupError, kernel_log, kvm, tools
from ndpy.tools.machines.place import GRACE_S, Place

_BOOT_LIMIT_S = 300.0
_KVM_BOOT_LIMIT_S = 60.0
# A host may boot again after a panic.
_OTHERS_LIMIT_S = 3 * _BOOT_LIMIT_S
_END_LIMIT_S = 30.0
_LOOK_FOR_LOCKUP_S = 5.0
# A kernel that panics still prints for a while, and may then hang.
_AFTER_PANIC_S = 3.0
# An emulated machine with several processors may panic in one boot, when it gets little time, and boot well the next
# time.
_BOOTS_AGAIN = 2
# udev's only rules in the VM. With those of the distribution it loads a module for each device of the PC, which takes
# half of the time of a boot in emulation.
_UDEV_RULES = 'SUBSYSTEM=="virtio-ports", ATTR{name}=="?*", SYMLINK+="virtio-ports/$attr{name}"\n'
_PORTS = ("control", "log", "out", "err")

# These describe places of the host session that the VM does not have.
_NOT_PASSED_ON = {"XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "TMPDIR", "LISTEN_FDS", "LISTEN_PID"}


@dataclass(frozen=True)
class Forward:
    """A TCP port of this machine's loopback interface that is forwarded to a port of the VM."""

    host_port: int
    guest_port: int


@dataclass(frozen=True)
class Machine:
    """The configuration of a VM."""

    cpus: int = 2
    memory: str = "2G"
    kernel: str | None = None
    # Where /lib/modules and /boot of the kernel are: "/", or a folder in which a kernel's packages were unpacked.
    kernel_root: Path = Path("/")
    adapters: tuple[str, ...] = ("rxe", "siw")
    icount: bool = False
    # Whether KVM may be used if it works.
    kvm: bool = True
    # The ports to forward over QEMU's user network, in which this machine is 10.0.2.2. None: no such network.
    forwards: tuple[Forward, ...] | None = None


@dataclass
class Outcome:
    """The outcome of a command. `status` is None if it is not known, and `reason` then says why.

    broken: the VM stopped working. Then output may be missing, even if the command succeeded.
    cut: another host cut this one's power.
    """

    status: int | None
    reason: str = ""
    timed_out: bool = False
    broken: bool = False
    cut: bool = False
    log: list[kernel_log.Record] = field(default_factory=list)
    console: str = ""


class _BootError(Exception):
    """The VM ended or hung before the command began. The message is the console's text."""


class _PanicError(_BootError):
    """The kernel reported a panic or an oops before the command began."""


class Stopped(Exception):
    """The VM was ended before its command ended, because its run was stopped."""


def _network_options(forwards: Sequence[Forward]) -> list[str]:
    rules = "".join(f",hostfwd=tcp:127.0.0.1:{rule.host_port}-:{rule.guest_port}" for rule in forwards)
    return [f"-netdev user,id=ndpy-net{rules}", "-device virtio-net-pci,netdev=ndpy-net"]


def _wire_options(place: Place) -> list[str]:
    options = []
    for i, wire in enumerate(place.wires):
        options.append(f"-netdev {wire.netdev},id=ndpy-wire{i}")
        options.append(f"-device virtio-net-pci,netdev=ndpy-wire{i},mac={wire.mac}{wire.device_options}")
    return options


def writable_folder(cwd: Path) -> Path:
    """The folder that the VM may write to: the Git checkout that contains `cwd`, or else `cwd`."""
    for folder in (cwd, *cwd.parents):
        if (folder / ".git").exists() and folder != Path.home():
            return folder
    return cwd


def _job_script(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> str:
    lines = ["# Runs the command in the environment and the folder of the caller."]
    for name, value in environment.items():
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name not in _NOT_PASSED_ON:
            lines.append(f"export {name}={shlex.quote(value)}")
    lines.append(f"cd {shlex.quote(str(cwd))} || exit 126")
    lines.append(f"exec {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def _python_folders() -> list[str]:
    """The folders of this Python, its packages and ndpy, which the VM caches.

    It does not cache its root. Without this cache, importing pytest takes 9 s in emulation, with it 2 s.
    """
    paths = sysconfig.get_paths()
    system = sys.base_prefix in ("/usr", "/usr/local")  # these contain too much besides Python
    base = paths["stdlib"] if system else sys.base_prefix
    own = paths["purelib"] if sys.prefix == sys.base_prefix else sys.prefix
    ndpy = str(Path(__file__).resolve().parents[2])
    return [folder for folder in dict.fromkeys((base, own, ndpy)) if os.path.isdir(folder)]


class _Stream:
    """Passes bytes to `sink` up to the end mark. Holds back bytes that could be the beginning of the mark."""

    def __init__(self, mark: bytes, sink: Callable[[bytes], None]) -> None:
        self._mark = mark
        self._sink = sink
        self._held = b""
        self.ended = False

    def feed(self, data: bytes) -> None:
        if self.ended:
            return
        data = self._held + data
        end = data.find(self._mark)
        if end >= 0:
            self.ended, self._held = True, b""
            self._pass_on(data[:end])
            return
        keep = next(
            (n for n in range(min(len(data), len(self._mark) - 1), 0, -1) if self._mark.startswith(data[-n:])),
            0,
        )
        self._held = data[len(data) - keep :]
        self._pass_on(data[: len(data) - keep])

    def _pass_on(self, data: bytes) -> None:
        if data:
            self._sink(data)

    def give_up(self) -> None:
        """Pass on the bytes that were held back. The VM has ended, so they are not the mark."""
        self._pass_on(self._held)
        self._held = b""


class _Session:
    """One VM. Use it as a context manager: leaving the context ends the VM in any case."""

    def __init__(self, machine: Machine, place: Place, merged: bool, kvm: bool) -> None:
        self._machine = machine
        self._place = place
        self._merged = merged
        self._kvm = kvm
        self._mark = f"ndpy-{secrets.token_hex(16)}"
        self._run = secrets.token_hex(8)
        self._selector = selectors.DefaultSelector()
        self._resources = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._control = b""
        self._control_port: socket.socket | None = None
        self._streams = {
            "out": _Stream(self._mark.encode(), place.out),
            "err": _Stream(self._mark.encode(), place.err),
        }
        self._log = kernel_log.Collector()
        self.ready = False
        self.began = False
        self.status: int | None = None
        self.failure = ""
        self.lockup = ""
        self._look_for_lockup = 0.0

    def __enter__(self) -> _Session:
        # Not $TMPDIR: the path of a socket has at most 107 bytes, and virtme-ng takes no path with a space.
        folder = tempfile.TemporaryDirectory(prefix="ndpy-softroce-", dir="/tmp")
        self._folder = Path(self._resources.enter_context(folder))
        self._resources.enter_context(contextlib.closing(self._selector))
        for port in _PORTS:
            listener = self._resources.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(self._folder / port))
            listener.listen(1)
            self._selector.register(listener, selectors.EVENT_READ, ("accept", port))
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._end()
        finally:
            self._resources.close()

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        # virtme-ng, its shell and QEMU are in the process group that start() created for them.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            try:
                process.wait(5)
                break
            except subprocess.TimeoutExpired:
                continue
        self.cut_power()

    def cut_power(self) -> None:
        """End the VM without a warning. A thread other than the session's may call this until the session ends."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def go(self) -> None:
        """Let the command begin, on a VM that is ready."""
        assert self._control_port is not None
        with contextlib.suppress(OSError):  # a VM that has ended is noticed by pump()
            self._control_port.sendall(b"go\n")

    def start(self, command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        machine = self._machine
        kernel = tools.find_kernel(machine.kernel, machine.kernel_root, machine.adapters)
        job = self._folder / "job"
        job.mkdir()
        (self._folder / "checkout").symlink_to(writable_folder(cwd))
        rules = self._folder / "rules"
        rules.mkdir()
        (rules / "ports.rules").write_text(_UDEV_RULES, encoding="utf-8")
        guest = resources.files("ndpy.tools.machines").joinpath("guest.sh").read_text(encoding="utf-8")
        (job / "guest.sh").write_text(guest, encoding="utf-8")
        # Words and values may be of any bytes.
        (job / "command").write_bytes(os.fsencode(_job_script(command, cwd, environment)))
        settings = {
            "MARK": self._mark,
            "RUN": self._run,
            "ADAPTERS": " ".join(machine.adapters),
            "MERGED": "1" if self._merged else "",
            "CHECKOUT": str(writable_folder(cwd)),
            "NETWORK": "" if machine.forwards is None else "1",
            "WIRES": " ".join(f"{wire.mac}/{wire.ipv4}/{wire.ipv6}" for wire in self._place.wires),
        }
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in settings.items()]
        (job / "settings").write_bytes(os.fsencode("".join(lines)))
        (job / "cached").write_bytes(os.fsencode("".join(f"{folder}\n" for folder in _python_folders())))

        vng = tools.find("vng")
        assert vng is not None
        qemu_options = [
            "-fsdev local,id=ndpy-host,path=/,security_model=none,multidevs=remap,readonly=on",
            "-device virtio-9p-pci,fsdev=ndpy-host,mount_tag=ndpy.host",
            f"-fsdev local,id=ndpy-checkout,path={self._folder}/checkout,security_model=none,multidevs=remap",
            "-device virtio-9p-pci,fsdev=ndpy-checkout,mount_tag=ndpy.checkout",
            "-device virtio-serial-pci,id=ndpy,max_ports=8",
        ]
        for port in _PORTS:
            qemu_options.append(f"-chardev socket,id=ndpy-{port},path={self._folder / port}")
            qemu_options.append(f"-device virtserialport,bus=ndpy.0,chardev=ndpy-{port},name=ndpy.{port}")
        if machine.icount:
            qemu_options.append("-icount shift=1,sleep=off")
        if machine.forwards is not None:
            qemu_options += _network_options(machine.forwards)
        qemu_options += _wire_options(self._place)
        arguments = [vng, "--verbose", "--run", str(kernel.image), "--force-9p", "--disable-microvm"]
        arguments += ["--cpus", "1" if machine.icount else str(machine.cpus), "--memory", machine.memory]
        arguments += [
            "--user",
            "root",
            "--append=loglevel=5 mitigations=off",
            f"--rodir={job}",
            f"--rodir=/usr/lib/udev/rules.d={rules}",
        ]
        if not self._kvm:
            arguments.append("--disable-kvm")
        arguments += [f"--qemu-opts={' '.join(qemu_options)}", "--", f"sh {job}/guest.sh {job}"]
        with (self._folder / "console").open("wb") as console:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                cwd=self._folder,
                env={**os.environ, "PATH": tools.search_path()},
                start_new_session=True,
            )

    def console(self) -> str:
        """The text of the VM's console."""
        return (self._folder / "console").read_text("utf-8", "replace")

    def fatal_line(self) -> str:
        return kernel_log.fatal_line(self.console())

    def over(self) -> bool:
        """Whether the command's status is known, or will not be known because the kernel is locked up."""
        if self.status is None and not self.lockup and time.monotonic() >= self._look_for_lockup:
            self.lockup = kernel_log.lockup_line(self.console())
            self._look_for_lockup = time.monotonic() + _LOOK_FOR_LOCKUP_S
        return self.status is not None or bool(self.lockup)

    def records(self) -> list[kernel_log.Record]:
        """The records of the kernel log since the command began."""
        begin = self._log.position(f"ndpy: begin {self._run}")
        end = self._log.position(f"ndpy: end {self._run}")
        return [] if begin is None else self._log.records[begin + 1 : end]

    @property
    def complete(self) -> bool:
        streams = [self._streams["out"]] if self._merged else list(self._streams.values())
        logged = self._log.position(f"ndpy: end {self._run}") is not None
        return self.status is not None and logged and all(stream.ended for stream in streams)

    def pump(self, until: Callable[[], bool], deadline: float) -> bool:
        """Process what the VM sends until until() is true.

        Returns False if the VM ends or the deadline passes first, else True. Raises Stopped if the run is stopped.
        """
        assert self._process is not None
        ended = False
        while not until():
            if self._place.together.stopped:
                raise Stopped
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            events = self._selector.select(0 if ended else min(left, 0.5))
            for key, _ in events:
                self._handle(key)
            if ended and not events:
                return until()
            ended = self._process.poll() is not None
        return True

    def _handle(self, key: selectors.SelectorKey) -> None:
        kind, port = key.data
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        if kind == "accept":
            connection = self._resources.enter_context(sock.accept()[0])
            self._selector.unregister(sock)
            self._selector.register(connection, selectors.EVENT_READ, ("read", port))
            if port == "control":
                self._control_port = connection
            return
        try:
            data = sock.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(sock)
        elif port == "log":
            self._log.feed(data)
        elif port == "control":
            *lines, self._control = (self._control + data).split(b"\n")
            for line in lines:
                self._handle_control_line(line.decode("utf-8", "replace"))
        else:
            self._streams[port].feed(data)

    def _handle_control_line(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "ready":
            self.ready = True
        elif word == "begin":
            self.began = True
        elif word == "kill":
            self._place.together.cut_power_of_others(self._place.number)
        elif word == "status":
            self.status = int(rest)
        elif word == "failed":
            self.failure = rest

    def give_up(self) -> None:
        for stream in self._streams.values():
            stream.give_up()


def _boot(session: _Session, limit_s: float) -> None:
    """Wait until the VM is ready."""
    session.pump(lambda: session.ready or bool(session.failure or session.fatal_line()), time.monotonic() + limit_s)
    if not session.ready and session.fatal_line():
        session.pump(lambda: False, time.monotonic() + _AFTER_PANIC_S)
        raise _PanicError(session.console())
    if session.failure:
        raise SetupError(f"the VM could not be set up: {session.failure}")
    if not session.ready:
        raise _BootError(session.console())


def _wait_for_others(session: _Session, place: Place) -> None:
    if not session.pump(lambda: place.together.all_ready, time.monotonic() + _OTHERS_LIMIT_S):
        raise SetupError(f"the VM ended, or waited {_OTHERS_LIMIT_S:g} s for the other host to boot")


def _run_once(
    command: Sequence[str],
    machine: Machine,
    limit_s: float,
    kvm: bool,
    environment: Mapping[str, str],
    place: Place,
    merged: bool,
) -> Outcome:
    together = place.together
    with _Session(machine, place, merged, kvm) as session:
        session.start(command, Path.cwd(), environment)
        _boot(session, _KVM_BOOT_LIMIT_S if kvm else _BOOT_LIMIT_S)
        together.is_ready(place.number, session.cut_power)
        _wait_for_others(session, place)
        session.go()
        deadline = time.monotonic() + limit_s
        told = session.pump(lambda: session.over() or together.failed, deadline)
        allowed = f"{limit_s:g} s"
        if told and not session.over():
            if time.monotonic() + GRACE_S < deadline:
                deadline = time.monotonic() + GRACE_S
                allowed = f"{GRACE_S:g} s after the other host had failed"
            told = session.pump(session.over, deadline)
        told = told and not session.lockup
        whole = told and session.pump(lambda: session.complete, time.monotonic() + _END_LIMIT_S)
        if not whole:
            session.give_up()
        outcome = Outcome(session.status, log=session.records(), console=session.console())
        if place.number in together.cut:
            outcome.cut = True
        elif session.lockup:
            outcome.broken = True
            outcome.reason = f"the kernel does not go on, so the VM was ended: {session.lockup}"
        elif not told and time.monotonic() >= deadline:
            outcome.timed_out = True
            outcome.reason = f"the command did not finish within {allowed}; the VM was ended"
        elif not told:
            outcome.broken = True
            outcome.reason = "the VM ended before the command did: the kernel panicked or was powered off"
        elif not whole:
            outcome.broken = True
            outcome.reason = "the VM hung after the command; the output may be incomplete"
        if outcome.status != 0 and not outcome.cut:
            together.failed = True
        together.has_ended(place.number)
        return outcome


def run(
    command: Sequence[str],
    machine: Machine,
    limit_s: float,
    say: Callable[[str], None],
    place: Place | None = None,
    merged: bool | None = None,
) -> Outcome:
    """Run `command` in a VM. Its output goes to this process's standard output and error as it arrives, or where
    `place` says.

    limit_s: after this many seconds the VM is ended. Booting has its own limit.
    say: called with one line about progress.
    merged: whether both streams of the command are one. Default: if this process's are.
    Raises SetupError if the VM cannot be started or set up, and Stopped if place.together was stopped.
    """
    absent = tools.missing(tools.FOR_VM)
    if absent:
        raise SetupError(tools.explain_missing(absent))
    kernel = tools.find_kernel(machine.kernel, machine.kernel_root, machine.adapters)
    qemu = tools.find("qemu-system-x86_64")
    assert qemu is not None
    place = place or Place()
    merged = os.path.sameopenfile(1, 2) if merged is None else merged
    environment = {"PYTHONUNBUFFERED": "1", **os.environ, **place.environment}
    with_kvm = machine.kvm and not machine.icount and kvm.works(qemu)
    panics = 0
    while True:
        how = "with KVM" if with_kvm else "in emulation (about 15 s to boot)"
        say(f"booting Linux {kernel.version} {how}")
        try:
            return _run_once(command, machine, limit_s, with_kvm, environment, place, merged)
        except _PanicError as error:
            panics += 1
            if panics > _BOOTS_AGAIN:
                raise SetupError(_explain_panics(kernel, machine, panics, str(error))) from None
            say(f"the kernel panicked while it booted, so the VM boots again: {kernel_log.fatal_line(str(error))}")
        except _BootError as error:
            if not with_kvm:
                console_tail = kernel_log.console_tail(str(error))
                raise SetupError(
                    f"the VM did not start (limit {_BOOT_LIMIT_S:g} s). The end of its console:\n{console_tail}"
                ) from None
            say("the VM did not start with KVM, so KVM is not tried again until this machine reboots")
            kvm.remember(qemu, False)
            with_kvm = False


def _explain_panics(kernel: tools.Kernel, machine: Machine, panics: int, console: str) -> str:
    one_processor = "" if machine.icount or machine.cpus == 1 else ", or boot it with one processor (--cpus 1)"
    return (
        f"Linux {kernel.version} ({kernel.image}) panicked in each of {panics} boots, before the command began: "
        f"{kernel_log.fatal_line(console)}\n"
        f"Choose another kernel of {machine.kernel_root / 'lib/modules'} (--kernel VERSION){one_processor}. The end of "
        f"its console:\n{kernel_log.console_tail(console)}"
    )
