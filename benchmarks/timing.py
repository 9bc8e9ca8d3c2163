"""What the loops in Python share: sizes, memory, and how a loop is measured. loops.c does the same in C.

A loop is the source of its body. It is compiled into a function whose local variables are the names that it uses, as in
a program that cares about speed. So the measured time has no further call or lookup. Those of AS_MODULES are compiled
as modules, as a short program is written: every name is looked up each time.
"""

import ctypes
import json
import math
import mmap
import textwrap
import time

BATCH = 64
RECEIVES = 2048
LENGTH = 8
PAGE = 4096
CONTEXT = 7
PORT = 1
# The GID of the IPv4 address. Index 0 is the link-local one.
GID_INDEX = 1

# The VM's timer interrupts 250 times a second, so a sample has 5 of its interrupts.
SAMPLE_NS = 20_000_000
SAMPLES = 9

# The operations of one turn of a loop, if there are several.
OPERATIONS = {
    "write_64_calls": BATCH,
    "write_64_list": BATCH,
    "receive_64_list": BATCH,
    "poll_64": BATCH,
    "poll_64_array": BATCH,
    "poll_64_looked_at": BATCH,
}
# These loops wait for one completion each turn.
WAITING = {
    *("write_afresh", "write_kept", "write_batch", "write_module_afresh", "write_module"),
    *("write_64_calls", "write_64_list", "write_of_1000"),
}
AS_MODULES = {"write_module_afresh", "write_module", "poll_module"}
# For these loops a round is RECEIVES // BATCH turns. Untimed steps come before and after. Then this many completions
# are left.
STEPS = {
    "receive_64_list": ((), ("deliver",), RECEIVES),
    "poll_64": (("post_receives", "deliver"), (), 0),
    "poll_64_array": (("post_receives", "deliver"), (), 0),
    "poll_64_looked_at": (("post_receives", "deliver"), (), 0),
}
# What every loop in Python costs without a body, and with the least that a call costs.
EMPTY_TURN = {"empty_turn": "pass", "empty_call": "nothing()"}

_TEMPLATE = """
def loop(rounds_, now_, {names}):
    begin_ = now_()
    for _ in range(rounds_):
{body}
    return now_() - begin_
"""

_MODULE = """
begin_ = now_()
for turn in range(rounds_):
{body}
spent_ = now_() - begin_
"""

# CLOCK_MONOTONIC on Linux, as in loops.c.
now = time.monotonic_ns


def pages(count):
    """Pages of zeros that stay in place, and their address."""
    mapped = mmap.mmap(-1, count * PAGE)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def compiled(body, names):
    """A function that runs the body as often as it is told, and returns the nanoseconds that this took."""
    scope = {}
    source = _TEMPLATE.format(names=", ".join(names), body=textwrap.indent(textwrap.dedent(body).strip(), " " * 8))
    exec(source, scope)
    return lambda rounds: scope["loop"](rounds, now, **names)


def as_module(body, names):
    """The same for a loop whose names are those of a module."""
    source = _MODULE.format(body=textwrap.indent(textwrap.dedent(body).strip(), " " * 4))
    code, scope = compile(source, "<module>", "exec"), {**names, "now_": now}

    def rounds_of(rounds):
        scope["rounds_"] = rounds
        exec(code, scope)
        return scope["spent_"]

    return rounds_of


def with_steps(turns, before, after, left, names):
    """A function that runs rounds of turns with untimed steps around them, and returns the nanoseconds of the turns."""

    def rounds_of(rounds):
        total = 0
        for _ in range(rounds):
            for step in before:
                names[step]()
            total += turns(RECEIVES // BATCH)
            for step in after:
                names[step]()
            drained = names["drain"]()
            if drained != left:
                raise RuntimeError(f"{drained} completions were left instead of {left}")
        return total

    return rounds_of


def summary(samples):
    """The median of the samples, and the distance of their quartiles as a part of it."""
    ordered, count = sorted(samples), len(samples)
    median = ordered[count // 2]
    return {"us": median, "spread": (ordered[3 * count // 4] - ordered[count // 4]) / median, "samples": count}


def measured(run, operations):
    """Measure a function that runs as many rounds as it is told, and returns the nanoseconds that counted.

    Returns:
        us: microseconds an operation, the median of the samples.
        spread: the distance of the samples' quartiles as a part of the median.
        rounds, samples: how many of each there were, without the warm-up.
    """
    # What only the first round does would make it seem long.
    run(1)
    rounds = 1
    while True:
        # The warm-up finds how many rounds take SAMPLE_NS.
        begin = now()
        run(rounds)
        if now() - begin >= SAMPLE_NS:
            break
        rounds *= 2
    return {**summary([run(rounds) / rounds / operations / 1000 for _ in range(SAMPLES)]), "rounds": rounds}


def measure(who, about, loops, names, late=None):
    """Measure the loops, and print a line of JSON for each.

    names: what the loops use. `check` raises if a write fails; a queue pair stays broken after a failure. `drain` takes
    all completions of receives and returns their number. `empty` is a list to which a loop adds an element when a poll
    finds nothing.
    late: by loop, a function that returns more names. It is called before that loop, because what it makes would slow
    down the loops before.
    """
    print(json.dumps({"who": who, **about}), flush=True)
    # Of the functions in Python itself that C implements, it does least: without arguments it returns 0 at once.
    names = {**names, "nothing": math.gcd}
    empty = names["empty"]
    for name, body in {**loops, **EMPTY_TURN}.items():
        if late and name in late:
            names.update(late[name]())
        run, operations = (as_module if name in AS_MODULES else compiled)(body, names), OPERATIONS.get(name, 1)
        if name in STEPS:
            run, operations = with_steps(run, *STEPS[name], names), RECEIVES
        empty.clear()
        line = {"who": who, "loop": name, **measured(run, operations)}
        if name in WAITING:
            # The warm-up of n rounds had 2n in all.
            turns = line["rounds"] * line["samples"] + 2 * line["rounds"]
            line["polls"] = 1 + len(empty) / turns
        names["check"]()
        print(json.dumps(line), flush=True)
