"""Ways in which an adapter misbehaves, for the tests of the smoke test's verdicts.

Each is a function that makes soft0 misbehave as long as a monkeypatch lasts: it changes what the near end gets to see,
or what the calls of the library do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kit.deadlines import patient

import ndpy
from ndpy import Status
from ndpy.platforms.verbs.memory import VerbsMemoryRegion
from ndpy.tools.cli.peers import PeerRefused
from ndpy.tools.cli.smoke import peer as far
from ndpy.tools.cli.smoke import report, resources, runner
from ndpy.tools.cli.smoke.catalog import Check, Result
from ndpy.tools.cli.smoke.testbed import Testbed

LIMIT_S = patient(3.0)


class Bed(Testbed):
    """A testbed that a run does not close, because the next run uses it too."""

    def __init__(self, adapter: ndpy.Adapter) -> None:
        super().__init__(adapter, adapter.info.name, None)

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


def judge(bed: Bed, check: Check) -> Result:
    """Run one check. Returns its verdict."""
    outcome = report.Run("soft0", "verbs")
    runner.Runner(bed, outcome, report.Reporter(1, terminal=False), limit_s=LIMIT_S).run([check])
    (result,) = outcome.results
    return result


class _Another:
    """A completion with some other values."""

    def __init__(self, real: Any, **values: Any) -> None:
        self._real = real
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _with(completion: Any, **values: Any) -> Any:
    if isinstance(completion, far.PeerCompletion):
        return dataclasses.replace(completion, **values)
    return _Another(completion, **values)


def _completions(monkeypatch: Any, change: Any) -> None:
    """Let change() make what both ends take from what they have taken."""
    for end in (resources.ConnectionEnd, far.PeerConnectionEnd):
        plain = end.take

        def take(self: Any, count: int, timeout_s: float, plain: Any = plain) -> Any:
            return change(plain(self, count, timeout_s), count)

        monkeypatch.setattr(end, "take", take)


def _each(monkeypatch: Any, change: Any) -> None:
    """Let change(completion) say what each completion has in place of its values."""
    _completions(monkeypatch, lambda taken, count: [_with(completion, **change(completion)) for completion in taken])


def loses_completions(monkeypatch: Any) -> None:
    _completions(monkeypatch, lambda taken, count: taken[:-1])


def reverses_completions(monkeypatch: Any) -> None:
    _completions(monkeypatch, lambda taken, count: taken[::-1])


def repeats_completions(monkeypatch: Any) -> None:
    """Something completes although nothing was asked for."""
    former: list[Any] = []

    def change(taken: list[Any], count: int) -> list[Any]:
        former[:] = taken or former
        return taken or former[:count]

    _completions(monkeypatch, change)


def says_success(monkeypatch: Any) -> None:
    """Whatever fails is told as a success."""
    _each(monkeypatch, lambda completion: {"status": Status.SUCCESS})


def says_timeout(monkeypatch: Any) -> None:
    _each(monkeypatch, lambda completion: {"status": Status.IO_TIMEOUT})


def counts_wrong(monkeypatch: Any) -> None:
    _each(monkeypatch, lambda completion: {"nbytes": completion.nbytes + 1})


def has_another_context(monkeypatch: Any) -> None:
    _each(monkeypatch, lambda completion: {"context": 1 << 40})


def is_another_operation(monkeypatch: Any) -> None:
    _each(monkeypatch, lambda completion: {"operation": ndpy.Operation.BIND})


def flips_a_byte(monkeypatch: Any) -> None:
    """One byte of what comes is another one, at either end."""
    for memory in (resources.Memory, far.PeerMemory):
        plain = memory.contents

        def contents(self: Any, offset: int = 0, length: Any = None, plain: Any = plain) -> bytes:
            found = bytes(plain(self, offset, length))
            return found[:-1] + bytes([found[-1] ^ 1]) if found else found

        monkeypatch.setattr(memory, "contents", contents)


def refuses_nothing(monkeypatch: Any) -> None:
    """Calls that should raise return instead, without an effect."""

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: Nothing()

        def __getitem__(self, key: Any) -> Any:
            return self

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    def swallow(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return plain(*arguments, **options)
            except (ndpy.NdpyError, OSError, ValueError, TypeError, LookupError):
                return Nothing()

        monkeypatch.setattr(owner, name, call)

    with ndpy.open_adapter("soft0") as adapter:
        queue = adapter.create_completion_queue(8)
        things = [queue, adapter.create_queue_pair(queue), adapter.create_connector(), adapter.register(bytearray(8))]
        kinds = [type(adapter), *map(type, things)]
        window = adapter.create_memory_window()
        kinds.append(type(window))
        for thing in (window, *reversed(things)):
            thing.close()
    for kind in kinds:
        for name in dir(kind):
            if (
                (name == "__getitem__" or not name.startswith("_"))
                and callable(getattr(kind, name))
                and name != "close"
            ):
                swallow(kind, name)
    for kind in kinds[:2]:
        swallow(kind, "close")
    swallow(ndpy, "open_adapter")


def notifies_at_once(monkeypatch: Any) -> None:
    """A notification comes before there is anything to tell."""

    def arm(self: Any, kind: Any = None) -> Any:
        pending: ndpy.Pending[None] = ndpy.Pending("arm")
        pending.succeed(None)
        return pending

    monkeypatch.setattr(ndpy.CompletionQueue, "arm", arm)


def never_notifies(monkeypatch: Any) -> None:
    monkeypatch.setattr(ndpy.CompletionQueue, "arm", lambda self, kind=None: ndpy.Pending("arm"))
    # Nobody waits for it for long.
    monkeypatch.setattr(Testbed, "step", lambda self, longest=0.1: 0.1)


def names_another_queue(monkeypatch: Any) -> None:
    plain = ndpy.Poller.wait

    def wait(self: Any, timeout_s: Any = None) -> Any:
        others = list(self._queues)
        return [(others[queue is others[0]], completions) for queue, completions in plain(self, timeout_s)]

    monkeypatch.setattr(ndpy.Poller, "wait", wait)


def tells_another_peer(monkeypatch: Any) -> None:
    """The connector's values are not those of its connection."""
    for name, value in (
        ("local_address", ("192.0.2.99", 1)),
        ("private_data", bytes(200)),
        ("read_limits", ndpy.ReadLimits(9, 9)),
    ):
        monkeypatch.setattr(ndpy.Connector, name, property(lambda self, value=value: value))


def gives_one_token_twice(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        VerbsMemoryRegion, "local_token", property(lambda self: 7, lambda self, token: None), raising=False
    )


def refuses_as_something_else(monkeypatch: Any) -> None:
    """The peer's accept() fails for another reason than that this end refused."""
    plain = far.Peer.finish

    def finish(self: Any, *arguments: Any) -> Any:
        try:
            return plain(self, *arguments)
        except PeerRefused as refused:
            raise PeerRefused("TimeoutError", refused.text) from None

    monkeypatch.setattr(far.Peer, "finish", finish)


def describes_itself_wrongly(monkeypatch: Any) -> None:
    """The adapter's description has a port that is down, the same GID twice, and a limit that is too low."""
    plain = Testbed.begin_check

    def begin_check(self: Any, limit_s: float) -> None:
        plain(self, limit_s)
        info = self.adapter.info
        port = dataclasses.replace(info.ports[0], gids=info.ports[0].gids[:1] * 2)
        self.info = dataclasses.replace(info, state="down", ports=(port,), max_caller_data=1)

    def end_check(self: Any, plain: Any = Testbed.end_check) -> Any:
        self.info = self.adapter.info
        return plain(self)

    monkeypatch.setattr(Testbed, "begin_check", begin_check)
    monkeypatch.setattr(Testbed, "end_check", end_check)
