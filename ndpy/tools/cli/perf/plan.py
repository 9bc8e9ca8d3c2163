"""What is measured: the tests, and the plan of a run. The measuring side makes the plan and sends it to the serving
side.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ndpy import Operation
from ndpy.tools.cli.channel import Arguments, BadRequest

#: The version of the protocol between the two sides. Both must have the same.
PROTOCOL = 3
DEFAULT_PORT = 18521

MIB = 1 << 20
DEFAULT_DEPTH = 128
#: Without --cq-mod, at most so many messages have one completion.
COMPLETE_EVERY = 100
#: The sizes of --all.
ALL_SIZES = tuple(1 << power for power in range(24))
#: The most memory that a run may use on each side.
MAX_MEMORY = 1 << 30
MAX_SIZE = 1 << 30
MAX_QUEUE_PAIRS = 128
MAX_DEPTH = 1 << 16
MAX_SECONDS = 86400.0
MAX_ITERATIONS = 1 << 40
#: A grant is a message of its own. With a small depth there would be one for every few messages.
LEAST_CREDIT = 128
#: Receives of a queue pair in a latency test of messages, and the depth of its initiator queue.
_LATENCY_RECEIVES = 8
_LATENCY_DEPTH = 64
_ALIGNMENT = 64


@dataclass(frozen=True)
class Test:
    """One of the measurements, with perftest's name and default values."""

    name: str
    operation: Operation
    is_latency: bool
    iterations: int
    size: int

    @property
    def is_round_trip(self) -> bool:
        """Whether both sides take turns. The latency is then half of the time."""
        return self.is_latency and self.operation is not Operation.READ


TESTS = {
    test.name: test
    for test in (
        Test("write_lat", Operation.WRITE, True, 1000, 2),
        Test("read_lat", Operation.READ, True, 1000, 2),
        Test("send_lat", Operation.SEND, True, 1000, 2),
        Test("write_bw", Operation.WRITE, False, 5000, 65536),
        Test("read_bw", Operation.READ, False, 1000, 65536),
        Test("send_bw", Operation.SEND, False, 1000, 65536),
    )
}


@dataclass(frozen=True)
class Plan:
    """What both sides have to know of a run.

    Attributes:
        test: a name in TESTS.
        largest: the largest size, in bytes.
        depth: how many requests of a queue pair may be outstanding.
        group: how many requests are posted one after the other. Only the last one has a completion.
        batch: whether a group is posted with one call.
        queue_pairs: their number.
        inline: messages up to this size are sent inline.
        bidirectional: whether both sides send at the same time.
        events: whether both sides sleep until a completion comes, instead of polling.
        timeout_s: how long a side waits for anything.
    """

    test: str
    largest: int
    depth: int = 1
    group: int = 1
    batch: bool = False
    queue_pairs: int = 1
    inline: int = 0
    bidirectional: bool = False
    events: bool = False
    timeout_s: float = 30.0

    @property
    def kind(self) -> Test:
        return TESTS[self.test]

    @property
    def peer_is_passive(self) -> bool:
        """Whether the serving side has nothing to do while the measuring side measures."""
        if self.kind.is_latency:
            return not self.kind.is_round_trip
        return self.kind.operation is not Operation.SEND and not self.bidirectional

    # ---- queues ----

    @property
    def initiator_depth(self) -> int:
        """The depth of a queue pair's initiator queue. Messages that grant credit need some places too."""
        if self.kind.is_latency:
            return _LATENCY_DEPTH
        return self.depth + (self.grants if self.kind.operation is Operation.SEND else 0)

    @property
    def credit(self) -> int:
        """How many messages a side may send before the other side grants more. As many receives are posted for them."""
        return max(2 * self.depth, LEAST_CREDIT)

    @property
    def grant(self) -> int:
        """How many more messages one grant allows."""
        return max(1, self.credit // 4)

    @property
    def grants(self) -> int:
        """How many grants may be on their way at once."""
        return self.credit // self.grant + 2

    @property
    def receives(self) -> int:
        """How many receives of a queue pair are posted."""
        if self.kind.operation is not Operation.SEND:
            return 1
        return _LATENCY_RECEIVES if self.kind.is_latency else self.credit + self.grants

    # ---- memory ----

    @property
    def slot(self) -> int:
        """The distance between two buffers."""
        return -(-self.largest // _ALIGNMENT) * _ALIGNMENT

    @property
    def memory(self) -> int:
        """The memory of a side: the bytes that it sends, then a buffer for each queue pair's messages."""
        return self.slot * (1 + self.queue_pairs)

    def inbox(self, index: int) -> int:
        """Where the buffer of a queue pair begins."""
        return self.slot * (1 + index)

    # ---- the message to the other side ----

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def take(cls, arguments: Arguments) -> Plan:
        """Take a plan out of a request. Raises BadRequest if a value is wrong."""
        plan = cls(
            test=arguments.text("test", 32),
            largest=arguments.integer("largest", 1, MAX_SIZE),
            depth=arguments.integer("depth", 1, MAX_DEPTH),
            group=arguments.integer("group", 1, MAX_DEPTH),
            batch=arguments.boolean("batch"),
            queue_pairs=arguments.integer("queue_pairs", 1, MAX_QUEUE_PAIRS),
            inline=arguments.integer("inline", 0, MAX_DEPTH),
            bidirectional=arguments.boolean("bidirectional"),
            events=arguments.boolean("events"),
            timeout_s=arguments.seconds("timeout_s", 3600.0),
        )
        if plan.test not in TESTS:
            raise BadRequest(f"there is no test {plan.test!r}")
        problem = plan.problem()
        if problem:
            raise BadRequest(problem)
        return plan

    def problem(self) -> str:
        """Why this plan cannot be carried out, or ""."""
        if self.group > self.depth:
            return f"{self.group} requests at a time do not fit a depth of {self.depth}"
        if self.memory > MAX_MEMORY:
            return (
                f"{self.queue_pairs} queue pairs with messages of {self.largest} bytes need {self.memory // MIB} MiB "
                f"on each side; at most {MAX_MEMORY // MIB} are allowed"
            )
        return ""


@dataclass(frozen=True)
class Round:
    """One size of a run, as the serving side has to know it.

    Attributes:
        size: the bytes of a message.
        seed: decides what the messages contain.
        groups: how many groups a side posts. 0 if the duration decides.
        warm_up: how many groups a side posts before that, uncounted.
        duration_s: how long. 0 for a number of groups.
    """

    size: int
    seed: int
    groups: int
    warm_up: int
    duration_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def take(cls, arguments: Arguments, plan: Plan) -> Round:
        """Take a round out of a request. Raises BadRequest if a value is wrong."""
        return cls(
            size=arguments.integer("size", 1, plan.largest),
            seed=arguments.integer("seed", 0, 1 << 31),
            groups=arguments.integer("groups", 0, MAX_ITERATIONS),
            warm_up=arguments.integer("warm_up", 0, MAX_ITERATIONS),
            duration_s=arguments.seconds("duration_s", MAX_SECONDS),
        )
