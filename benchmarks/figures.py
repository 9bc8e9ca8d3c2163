"""What `make bench` compares: the loops, the bars, and how figures become ratios and verdicts."""

from dataclasses import dataclass

# The columns. C is what the others are divided by. "shim" is C with libndpyfaults.so, without a scenario.
PROGRAMS = ("C", "shim", "pyverbs", "ibverbs", "ndpy")

LOOPS = {
    "write_afresh": "8-byte write, request afresh, post and poll",
    "write_kept": "the same, request kept",
    "write_batch": "the same, a kept batch of one, polled into an array",
    "write_module_afresh": "8-byte write afresh, as the statements of a module; poll(1)",
    "write_module": "the same, request kept",
    "write_64_calls": "64 writes, a call each, one signalled; each",
    "write_64_list": "64 writes in one call, one signalled; each",
    "write_of_1000": "8-byte write, with 1,000 queue pairs on the queue",
    "poll_empty": "poll of an empty queue",
    "poll_module": "poll(1) of an empty queue, as a statement of a module",
    "register_4k": "register and deregister 4 KiB",
    "receive_64_list": "64 receives in one call; each",
    "poll_64": "64 completions polled at once; each",
    "poll_64_array": "the same, into an array; each",
    "poll_64_looked_at": "64 polled at once, context and status looked at; each",
    "slice_region": "slicing a region",
    "cache_hit": "hit of the registration cache, with release",
    "empty_turn": "one turn of an empty loop, part of every figure",
    "empty_call": "the same, with a call of a function in C that does next to nothing",
    "send_lat_events": "ping-pong of two processes that wait on the channel, as ib_send_lat -e; half a round trip",
    "write_bw_64k": "64 KiB writes, 16 outstanding, as ib_write_bw; each",
    "softnd_receive": "softnd: post a receive",
    "softnd_poll_64": "softnd: 64 completions polled into an array; each",
    "softnd_poll_empty": "softnd: poll of an empty queue",
    "cache_hit_here": "hit of the registration cache, with release, on this machine's clock",
    "idle_queue_pair": "an idle queue pair of depth 4: ndpy's own memory, without the provider's; bytes",
}
# Those of two processes, in which C is perftest.
OF_TWO_PROCESSES = ("send_lat_events", "write_bw_64k")
# Those that are measured under Wine, with the machine's own clock.
ON_SOFTND = [loop for loop in LOOPS if loop.startswith("softnd_")]
# Those that are measured on soft0, on this machine.
HERE = ("cache_hit_here", "idle_queue_pair")

# A figure whose samples differ by more than this part of it is not stable.
STABLE = 0.01


@dataclass(frozen=True)
class Bar:
    """A figure that must not be larger than `limit`.

    against: the program whose figure is the divisor. "" if the limit is in microseconds, or in bytes.
    reference: that program's loop; "" for the same one.
    who: the program whose figure it is.
    """

    name: str
    loop: str
    limit: float
    against: str = "C"
    reference: str = ""
    who: str = "ndpy"

    @property
    def part(self):
        return "softnd" if self.loop in ON_SOFTND else "here" if self.loop in HERE else "rxe"

    @property
    def unit(self):
        if self.reference:
            return f"times {LOOPS[self.reference]}"
        return f"times {self.against}" if self.against else "bytes" if self.loop == "idle_queue_pair" else "us"


BARS = (
    Bar("8-byte write, element sliced afresh", "write_afresh", 1.15),
    Bar("8-byte write, element kept", "write_kept", 1.10),
    Bar("8-byte write, kept batch of one, poll_into", "write_batch", 1.08),
    Bar("8-byte write as statements of a module, sliced afresh", "write_module_afresh", 1.15),
    Bar("8-byte write as statements of a module, element kept", "write_module", 1.12),
    Bar("64 writes by plain calls, one signalled", "write_64_calls", 1.07),
    Bar("64 writes in a batch, one signalled", "write_64_list", 1.02),
    Bar("8-byte write, with 1,000 queue pairs on the queue", "write_of_1000", 1.05, "ndpy", "write_kept"),
    Bar("poll of an empty queue", "poll_empty", 0.45, "pyverbs"),
    Bar("poll(1) of an empty queue as a statement of a module", "poll_module", 0.5, "pyverbs"),
    Bar("slicing a region", "slice_region", 1.1, ""),
    Bar("64 receives posted in one call", "receive_64_list", 1.12),
    Bar("64 completions polled into an array", "poll_64_array", 2.0),
    Bar("completion polled with 63 others and looked at", "poll_64_looked_at", 0.7, ""),
    Bar("register and deregister 4 KiB", "register_4k", 1.20),
    Bar("cache hit with release", "cache_hit", 2.2, ""),
    Bar("cache hit with release, on this machine's clock", "cache_hit_here", 0.2, ""),
    Bar("ping-pong of two processes that wait on the channel", "send_lat_events", 1.25),
    # 0.99 of the bandwidth.
    Bar("64 KiB writes, 16 outstanding", "write_bw_64k", 1 / 0.99),
    Bar("softnd: post a receive", "softnd_receive", 2.5),
    Bar("softnd: 64 completions polled into an array, each", "softnd_poll_64", 5.0),
    Bar("softnd: poll of an empty queue", "softnd_poll_empty", 1.5),
    Bar("an idle queue pair", "idle_queue_pair", 1252, ""),
    Bar("the shim without a scenario: 8-byte write", "write_kept", 1.01, who="shim"),
    Bar("the shim without a scenario: poll of an empty queue", "poll_empty", 1.01, who="shim"),
    Bar("the shim without a scenario: 64 receives posted in one call", "receive_64_list", 1.01, who="shim"),
)


class Figures:
    """What the programs printed: the records of the loops, and what each program says of itself."""

    def __init__(self, lines):
        #: By loop and program.
        self.records = {}
        #: By program.
        self.about = {}
        for line in lines:
            self.add(line)

    def add(self, line):
        """Take a line of a program, which is a dict. Returns whether it was a loop's."""
        fields = dict(line)
        who = fields.pop("who")
        if who not in PROGRAMS:
            raise ValueError(f"unknown program {who!r}")
        if "loop" not in fields:
            self.about.setdefault(who, {}).update(fields)
            return False
        loop = fields.pop("loop")
        if loop not in LOOPS:
            raise ValueError(f"{who} has an unknown loop {loop!r}")
        if who in self.records.setdefault(loop, {}):
            raise ValueError(f"{who} has measured {loop} twice")
        self.records[loop][who] = fields
        return True

    def us(self, loop, who):
        """Microseconds an operation. None if the program does not have that loop."""
        record = self.records.get(loop, {}).get(who)
        return None if record is None else record["us"]

    def ratio(self, loop, who, against="C", reference=""):
        """One program's figure divided by another's, of the same loop or of `reference`.
        None if one of them is absent.
        """
        figure, divisor = self.us(loop, who), self.us(reference or loop, against)
        return None if figure is None or not divisor else figure / divisor

    def value(self, bar):
        """The figure to compare with the bar's limit. None if it was not measured."""
        if not bar.against:
            return self.us(bar.loop, bar.who)
        return self.ratio(bar.loop, bar.who, bar.against, bar.reference)

    def met(self, bar):
        """Whether the bar is met. A figure that is absent does not."""
        value = self.value(bar)
        return value is not None and value <= bar.limit

    def unstable(self):
        """The figures by the instruction clock whose samples differ too much, as (loop, program, spread)."""
        return [
            (loop, who, record["spread"])
            for loop, of_programs in self.records.items()
            for who, record in of_programs.items()
            if record["spread"] > STABLE and loop not in (*ON_SOFTND, *HERE)
        ]

    def waiting(self):
        """The figures that include waiting, because a poll found nothing, as (loop, program, polls a completion)."""
        return [
            (loop, who, record["polls"])
            for loop, of_programs in self.records.items()
            for who, record in of_programs.items()
            if record.get("polls", 1) > 1 + STABLE
        ]
