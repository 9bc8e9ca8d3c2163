"""A rank: it has a worker for each of its adapters, and does what rank 0 says until rank 0 says that it is over."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from ndpy.fleet import lldp
from ndpy.fleet.engines.rendezvous import Message
from ndpy.fleet.measure import TOKEN_SIZE, Worker
from ndpy.tools.cli.channel import Arguments, BadRequest, Channel, ChannelClosed, ChannelError
from ndpy.tools.cli.peers import PeerLost, PeerRefused

#: How long rank 0 may be silent. It sends nothing while others measure.
_SILENCE_S = 3600.0
_SEND_S = 10.0
_FACTS_S = 120.0
_LONGEST_S = 3600.0


class Member:
    """What this rank does. `serve()` returns when rank 0 says so or has gone."""

    def __init__(self, channel: Channel, adapters: list[str]) -> None:
        self._channel, self._adapters = channel, adapters
        self._workers: dict[int, Worker] = {}
        #: The adapters whose worker has died or hangs, and why. They are not used again: their partners know its port.
        self._lost: dict[int, PeerLost] = {}
        self._commands = {"examine": self._examine, "counters": self._counters, "pair": self._pair, "flow": self._flow}
        self._sending = threading.Lock()
        self._is_over = False

    def serve(self) -> None:
        """Do what rank 0 says."""
        try:
            while True:
                message = self._channel.receive(_SILENCE_S)
                if message.get("do") == "end":
                    return
                if message.get("do") == "there":
                    self._answer({"id": message.get("id")})
                    continue
                # Several adapters measure at the same time.
                threading.Thread(target=self._do, args=(message,), daemon=True).start()
        except ChannelClosed:
            return
        finally:
            self.close()

    def close(self) -> None:
        """End all workers at once."""
        self._is_over = True
        for worker in list(self._workers.values()):
            worker.kill()
            with contextlib.suppress(Exception):
                worker.close()
        self._workers = {}

    def _do(self, message: Message) -> None:
        number = message.get("id")
        try:
            arguments = Arguments({name: value for name, value in message.items() if name != "id"})
            name = arguments.text("do", 32)
            if name not in self._commands:
                raise BadRequest(f"this rank has no command {name!r}")
            answer: Message = self._commands[name](arguments)
        except PeerLost as error:
            answer = {"error": str(error), "lost": True}
        except (PeerRefused, BadRequest, OSError) as error:
            answer = {"error": str(error)}
        self._answer({"id": number, **answer})

    def _answer(self, message: Message) -> None:
        with contextlib.suppress(ChannelError), self._sending:
            self._channel.send(message, _SEND_S)

    def _worker(self, place: int) -> Worker:
        """The worker of an adapter. It is started when it is needed first."""
        if place in self._lost:
            raise self._lost[place]
        if place not in self._workers:
            self._workers[place] = Worker(self._adapters[place])
            if self._is_over:
                self._workers.pop(place).kill()
                raise PeerLost("this rank ends")
        return self._workers[place]

    def _call(self, place: int, command: str, wait_s: float, **arguments: Any) -> Message:
        worker = self._worker(place)
        try:
            return worker.call(command, wait_s, **arguments)
        except PeerLost as error:
            self._lost[place] = error
            self._workers.pop(place, None)
            worker.kill()
            with contextlib.suppress(Exception):
                worker.close()
            raise

    def _examine(self, arguments: Arguments) -> Message:
        """What the adapters are and say, and where partners reach them. One that does not work has an error.

        With `lldp`, also what the switches of this machine are called, or why that is unknown.
        """
        with_switches = arguments.boolean("lldp")
        arguments.finish()
        ends: list[Message] = []
        for place, name in enumerate(self._adapters):
            try:
                told = self._call(place, "facts", _FACTS_S)
                ends.append({"adapter": name, **told, **self._call(place, "listen", 0.0)})
            except (PeerLost, PeerRefused) as error:
                ends.append({"adapter": name, "error": str(error)})
        return {"ends": ends, **(_switches() if with_switches else {})}

    def _counters(self, arguments: Arguments) -> Message:
        arguments.finish()
        found = {}
        for place, name in enumerate(self._adapters):
            with contextlib.suppress(PeerLost, PeerRefused):
                found[name] = self._call(place, "counters", 0.0)["counters"]
        return {"counters": found}

    def _pair(self, arguments: Arguments) -> Message:
        place = arguments.integer("place", 0, len(self._adapters) - 1)
        timeout_s = arguments.seconds("timeout_s", _LONGEST_S)
        asked = {"pings": arguments.integer("pings", 1, 10_000), **self._common(arguments, timeout_s)}
        answer = self._call(place, "pair", timeout_s, **asked)
        return {name: answer.get(name) for name in ("latency_us", "bandwidth_gbps")}

    def _flow(self, arguments: Arguments) -> Message:
        place = arguments.integer("place", 0, len(self._adapters) - 1)
        timeout_s = arguments.seconds("timeout_s", _LONGEST_S)
        asked = {"senders": arguments.integer("senders", 0, 64), **self._common(arguments, timeout_s)}
        answer = self._call(place, "flow", timeout_s, **asked)
        return {name: answer.get(name) for name in ("bandwidth_gbps", "sending", "receiving")}

    def _common(self, arguments: Arguments, timeout_s: float) -> dict[str, Any]:
        """The arguments that a pair and a flow have. They are the last ones."""
        asked: dict[str, Any] = {
            "token": arguments.text("token", TOKEN_SIZE * 2),
            "timeout_s": timeout_s,
            "write_s": arguments.seconds("write_s", 60.0),
        }
        if arguments.has("addresses"):
            asked["addresses"] = arguments.text("addresses", 4096)
            asked["port"] = arguments.integer("port", 1, 65535)
            asked["same_machine"] = arguments.boolean("same_machine")
        arguments.finish()
        return asked


def _switches() -> Message:
    try:
        return {"switches": lldp.ask()}
    except lldp.LldpError as error:
        return {"no_switches": str(error)}
