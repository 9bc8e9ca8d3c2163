"""A verbs provider without a device (fake_verbs.c). Each test loads its own in place of libibverbs and librdmacm."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled import SHARED
from kit import linux_only as linux_only
from kit.compiling import compiled
from kit.deadlines import DEADLINE_S

import ndpy
from ndpy.platforms.verbs import adapter_info, native_calls, probing, softverbs
from ndpy.vocabulary import system_files

SOURCES = [
    Path(__file__).with_name(f"fake_{part}.c")
    for part in ("verbs", "points", "completions", "queues", "connections", "xrc")
]
HEADER = Path(__file__).with_name("fake_verbs.h")
SOFTVERBS = Path(__file__).with_name("fake_softverbs.c")


class GidEntry(ctypes.Structure):
    """struct ibv_gid_entry."""

    _fields_ = (
        ("value", ctypes.c_ubyte * 16),
        *((name, ctypes.c_uint32) for name in ("index", "port", "type", "ifindex")),
    )


def structure(name: str, *sources: Path) -> type[ctypes.Structure]:
    """A structure of numbers, with the fields that one of these files of C declares."""
    kinds = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64}
    text = "".join(source.read_text() for source in sources or (HEADER, *SOURCES, SOFTVERBS))
    declared = re.search(rf"struct {name} \{{(.*?)\n\}}", text, re.DOTALL)
    assert declared, name
    fields = re.findall(r"^ +(\w+) (\w+)(?:\[(\d+)\])?;", declared[1], re.MULTILINE)
    members = [(field, kinds[kind] * int(count) if count else kinds[kind]) for kind, field, count in fields]
    return type(name, (ctypes.Structure,), {"_fields_": members})


class Counts(structure("fake_counts")):
    """struct fake_counts."""

    def left(self) -> dict[str, int]:
        """The objects that still exist, with their numbers."""
        return {name: getattr(self, name) for name, _ in self._fields_ if name != "armed" and getattr(self, name)}


def _pointer(native: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(native_calls.ffi.cast("uintptr_t", native)))


class FakeVerbs:
    """The provider of one test.

    Attributes:
        settings: how the provider behaves.
        seen: the calls that it got.
        counts: its objects.
        failures: which calls fail next.
        connecting: which events of connections come by themselves.
        extended: extended completion queues, and the clock.
        xrc: whether the device has XRC.
    Between hold() and release(), registrations wait in ibv_reg_mr().
    """

    def __init__(self, path: Path, name: str = "fake0") -> None:
        self.path = path
        self.name = name
        self._library = ctypes.CDLL(str(path))
        self.settings = self.variable("fake_settings")
        self.seen = self.variable("fake_seen")
        self.counts = Counts.in_dll(self._library, "fake_counts")
        self.failures = self.variable("fake_failures")
        self.connecting = self.variable("fake_connecting")
        self.ports = (structure("fake_port") * 8).in_dll(self._library, "fake_ports")
        self._gids = (GidEntry * 1024).in_dll(self._library, "fake_gids")
        self.xrc = ctypes.c_int32.in_dll(self._library, "fake_xrc")
        self.extended = self.variable("fake_extended")
        self._adapters: weakref.WeakSet[ndpy.Adapter] = weakref.WeakSet()

    def variable(self, name: str) -> Any:
        """The structure with this name in the library."""
        return structure(name).in_dll(self._library, name)

    def have_gid(
        self, address: str, index: int, port: int = 1, kind: str = "RoCE v2", netdev: str | None = None
    ) -> None:
        """Give a port a GID. netdev: the interface that the kernel says it belongs to."""
        gid = ipaddress.ip_address(address)
        packed = gid.packed if gid.version == 6 else bytes(10) + b"\xff\xff" + gid.packed
        number = [
            native_calls.lib.IBV_GID_TYPE_IB,
            native_calls.lib.IBV_GID_TYPE_ROCE_V1,
            native_calls.lib.IBV_GID_TYPE_ROCE_V2,
        ]
        entry = self._gids[self.settings.gids]
        entry.value[:] = packed
        entry.index, entry.port = index, port
        entry.type = number[["InfiniBand", "RoCE v1", "RoCE v2"].index(kind)]
        self.settings.gids += 1
        if netdev is not None:
            folder = self.folder / f"ports/{port}/gid_attrs/ndevs"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(index)).write_text(f"{netdev}\n")

    def hold(self) -> None:
        self._library.fake_hold(1)

    def release(self) -> None:
        self._library.fake_hold(0)

    @property
    def folder(self) -> Path:
        """What the kernel shows of the device."""
        made = adapter_info.folder_of("fake0")
        made.mkdir(exist_ok=True)
        return made

    def speak_iwarp(self) -> None:
        (self.folder / "node_type").write_text("4: RNIC\n")
        self.connecting.iwarp = 1

    def have_address(self) -> None:
        """Give the device the loopback interface's address, so that connections can be made."""
        (self.folder / "parent").write_text("lo\n")

    # ---- events from outside ----

    def complete(self, queue_pair: Any, *, receive: bool = True, status: int = 0, nbytes: int = 0) -> bool:
        """Complete the oldest request of that side with this enum ibv_wc_status. Returns False if there is none."""
        return bool(self._library.fake_complete(queue_pair._number, int(receive), status, nbytes))

    def deliver(self, sender: Any, receiver: int) -> bool:
        """Carry the oldest message of an XRC sender to a receiver. Returns False if there is none, or nothing receives
        it.
        """
        return bool(self._library.fake_deliver(sender._number, receiver))

    def spurious_event(self, queue: Any) -> None:
        """Raise an event of the queue's channel for a completion that was taken before."""
        self._library.fake_spurious_event(_pointer(queue._cq))

    def disarm(self, queue: Any) -> None:
        """Disarm the queue, as if its driver raised no event for completions."""
        self._library.fake_disarm(_pointer(queue._cq))

    def device_event(self, adapter: Any, kind: int, queue_pair: Any = None) -> None:
        """Raise an enum ibv_event_type of the device or of a queue pair."""
        number = queue_pair._number if queue_pair is not None else 0
        self._library.fake_async_event(_pointer(adapter._context), kind, number)

    def remove(self, adapter: Any) -> None:
        """Remove the device."""
        self.device_event(adapter, native_calls.lib.IBV_EVENT_DEVICE_FATAL)

    def overrun(self, queue: Any) -> None:
        self._library.fake_overrun_event(_pointer(queue._cq))

    def connection_event(self, connector: Any, kind: int, status: int = 0) -> bool:
        """Raise an enum rdma_cm_event_type for a connector. Returns False if it has no identifier."""
        return bool(self._library.fake_connection_event(ctypes.c_uint64(connector._serial), kind, status))

    def files_of_manager(self) -> list[int]:
        """The files of the device that librdmacm keeps open."""
        files = (ctypes.c_int * 2)()
        self._library.fake_manager_files(files)
        return list(files)

    def request(self, listener: Any, *, elsewhere: bool = False) -> None:
        """A client asks for a connection. elsewhere: over another device with the listener's address."""
        assert self._library.fake_connection_request(ctypes.c_uint64(listener._serial), int(elsewhere))

    def call_at_points(self, function: Any) -> None:
        """Call function(name, after) before and after each native call, in its thread. None ends that."""
        self._on_point = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)(function) if function else None
        address = ctypes.cast(self._on_point, ctypes.c_void_p).value if self._on_point else None
        ctypes.c_void_p.in_dll(self._library, "fake_on_point").value = address

    def calls_of(self, *names: str) -> list[str]:
        """The calls of these functions from now on, in order."""
        calls: list[str] = []

        def note(name: bytes, after: int) -> None:
            if not after and name.decode() in names:
                calls.append(name.decode())

        self.call_at_points(note)
        return calls

    def close_all(self) -> None:
        """Close the objects that a failed test left. Collected later, they would call another test's provider."""
        self.call_at_points(None)
        for adapter in list(self._adapters):
            for thing in [*sorted(adapter._open_children(), key=lambda child: child._release_order), adapter]:
                with contextlib.suppress(Exception):
                    thing.close()

    def fault(self) -> str:
        """The first wrong use of an object since the last call of this, or ""."""
        text = ctypes.create_string_buffer(256)
        self._library.fake_take_fault(text, ctypes.c_size_t(256))
        return text.value.decode()

    def open(self, **settings: int) -> ndpy.Adapter:
        """Open the adapter with these settings."""
        for name, value in settings.items():
            setattr(self.settings, name, value)
        probing._probed.clear()
        adapter = ndpy.open_adapter(self.name)
        self._adapters.add(adapter)
        # Opening has registered memory to find out what the device can do.
        self.seen.calls = self.seen.most_at_once = 0
        return adapter

    @contextlib.contextmanager
    def open_pair(self, **settings: int) -> Iterator[tuple[ndpy.Adapter, ndpy.CompletionQueue, ndpy.QueuePair]]:
        """open(), with a completion queue and a queue pair. All of them are closed at the end."""
        with (
            self.open(**settings) as adapter,
            adapter.create_completion_queue(32) as queue,
            adapter.create_queue_pair(queue) as queue_pair,
        ):
            yield adapter, queue, queue_pair


def _build(folder: Path, name: str, *more: Path) -> Path:
    if not Path("/usr/include/rdma/rdma_cma.h").exists():
        pytest.skip("building the provider needs libibverbs-dev and librdmacm-dev")
    return compiled(folder / name, *SHARED, *SOURCES, *more, "-Wl,--no-as-needed", "-libverbs", "-lrdmacm")


@pytest.fixture(scope="session")
def fake_verbs_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("fake_verbs"), "fake_verbs.so")


@pytest.fixture(scope="session")
def fake_softverbs_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = _build(tmp_path_factory.mktemp("fake_softverbs"), softverbs.LIBRARY, SOFTVERBS)
    # ndpy loads neither.
    for name in (softverbs.IBVERBS, softverbs.RDMACM):
        shutil.copy(path, path.with_name(name))
    return path


def _this_machine_without_adapters(root: Path) -> Path:
    """A root folder with this machine's files, and an empty /sys/class/infiniband."""
    (root / "sys/class/infiniband").mkdir(parents=True)
    for name in ("dev", "etc", "proc", "sys/class/net", "sys/devices"):
        (root / name).symlink_to(f"/{name}")
    return root


def _check_end(fake: FakeVerbs) -> None:
    """No object may exist, and none may have been used after its end."""
    fake.call_at_points(None)
    fault = fake.fault()
    assert not fault, fault
    assert fake.seen.registered == 0
    # A thread closes dropped objects, which may take a moment.
    deadline = time.monotonic() + 30
    while fake.counts.left():
        assert time.monotonic() < deadline, fake.counts.left()
        time.sleep(0.001)
    # A process has one librdmacm, and each test another copy.
    for file in fake.files_of_manager():
        if file > 0:
            os.close(file)


@pytest.fixture
def fake(
    fake_verbs_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[FakeVerbs]:
    """The provider. At the end no object may exist, and none may have been used after its end."""
    # Looking again and again has points between native calls without an end. Tests of it turn it on.
    monkeypatch.setattr("ndpy.objects.completion_queue._SPIN_S", 0.0)
    copy = Path(shutil.copy(fake_verbs_path, tmp_path / "fake.so"))
    monkeypatch.setattr(system_files, "_root", _this_machine_without_adapters(tmp_path / "machine"))
    # A test before this one may have put soft0 there for the whole session.
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    monkeypatch.setenv("NDPY_LIBIBVERBS", str(copy))
    monkeypatch.setenv("NDPY_LIBRDMACM", str(copy))
    monkeypatch.setattr(native_calls, "_loaded", False)
    fake = FakeVerbs(copy)
    yield fake
    fake.release()
    if getattr(request.node, "failed", False):
        fake.close_all()
    probing._probed.clear()
    # The next adapter uses the system's libraries again.
    monkeypatch.undo()
    native_calls._loaded = False
    _check_end(fake)


@pytest.fixture
def soft(
    fake_softverbs_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[FakeVerbs]:
    """A provider in place of this installation's softverbs. Checked at the end as the other one is."""
    folder = tmp_path / "soft"
    shutil.copytree(fake_softverbs_path.parent, folder)
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    monkeypatch.setattr("ndpy.objects.completion_queue._SPIN_S", 0.0)
    monkeypatch.setattr(softverbs, "folder", lambda: folder)
    monkeypatch.setattr(native_calls, "_softverbs_loaded", False)
    probing._probed.clear()
    soft = FakeVerbs(folder / softverbs.LIBRARY, softverbs.NAME)
    yield soft
    if getattr(request.node, "failed", False):
        soft.close_all()
    probing._probed.clear()
    native_calls._softverbs_loaded = False
    _check_end(soft)


def opened(**settings: int) -> Any:
    """A fixture: the provider's adapter, opened with these settings. It has an address."""

    @pytest.fixture
    def adapter(fake: FakeVerbs) -> Iterator[ndpy.Adapter]:
        fake.have_address()
        with fake.open(**settings) as adapter:
            yield adapter

    return adapter


@pytest.fixture
def connected(adapter: ndpy.Adapter, queue: ndpy.CompletionQueue) -> Iterator[ndpy.QueuePair]:
    """A connected queue pair of the module's adapter."""
    with (
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.connect(queue_pair, ("127.0.0.1", 4791), timeout_s=DEADLINE_S),
    ):
        yield queue_pair
