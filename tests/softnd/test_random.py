"""Random operations from both ends of several connections, compared with a model of two memories.

Only one side initiates at a time, so the result is certain. The model executes every request when it is posted.
Afterwards, all completions and both memories must equal the model's. A failure prints the seed and the number of
the step. NDPY_STRESS=1 makes 100,000 operations.
"""

from __future__ import annotations

import pytest
from conftest import share
from consumer import Region, accept, connect, get_address, get_results, pointer, sges, wait_until
from version2 import Kind, Mr, Op, Status, ffi, raw

BUFFERS, SIZE = 4, 16384
OPERATIONS = share(100_000, 6_000)

pytestmark = pytest.mark.timeout(3600)


class ModelRegion:
    """A region of the model."""

    def __init__(self, real, buffer, start, size, flags):
        self.real, self.buffer, self.start, self.size, self.flags = real, buffer, start, size, flags
        self.pins = 0
        self.address = real.address

    def allows(self, write):
        return bool(self.flags & (4 if write else 2))


class ModelWindow:
    """A window of the model. `end` is the end that it is bound through, or None."""

    def __init__(self, real):
        self.real, self.end = real, None

    def allows(self, write):
        return bool(self.flags & (Op.ALLOW_WRITE if write else Op.ALLOW_READ))


class Machine:
    """An adapter object and its memory, the real one and the model's."""

    def __init__(self, kit, rng):
        self.kit, self.rng, self.node = kit, rng, kit.node()
        self.real = [ffi.new("char[]", SIZE) for _ in range(BUFFERS)]
        self.model = [bytearray(SIZE) for _ in range(BUFFERS)]
        self.base = [int(ffi.cast("uintptr_t", buffer)) for buffer in self.real]
        for real, model in zip(self.real, self.model, strict=True):
            model[:] = rng.randbytes(SIZE)
            ffi.buffer(real)[0:SIZE] = bytes(model)
        self.regions: list[ModelRegion] = []
        self.windows = [ModelWindow(self.node.window()) for _ in range(6)]
        self.stale: list[tuple[int, int]] = []
        for _ in range(4):
            self.register(Mr.EVERYTHING)

    def register(self, flags=None):
        buffer = self.rng.randrange(BUFFERS)
        start = self.rng.randrange(SIZE - 1) if self.rng.random() < 0.5 else 0
        size = self.rng.randint(1, SIZE - start)
        if flags is None:
            flags = self.rng.randrange(16)
            flags |= flags >> 2 & 1  # remote write implies local write
        mr = self.node.mr()
        address = self.base[buffer] + start
        assert self.kit.do(mr, "Register", pointer(address), size, flags) == Status.SUCCESS
        self.regions.append(ModelRegion(Region(mr, None, address, size), buffer, start, size, flags))

    def deregister(self, region):
        bound = any(w.end and w.region is region for w in self.windows)
        remote = region.real.remote
        code = self.kit.do(region.real.mr, "Deregister")
        assert code == (Status.DEVICE_BUSY if bound else Status.SUCCESS)
        if not bound:
            self.regions.remove(region)
            self.stale.append((remote, region.address))
            region.real.mr.release()

    def elements(self, total, write, most=4):
        """Return elements of `total` bytes altogether and their places in the model, or None if no region fits."""
        rng = self.rng
        usable = [r for r in self.regions if not write or r.flags & 1]
        if not usable:
            return None
        found, places = [], []
        left = total
        for i in range(rng.randint(1, most)):
            region = rng.choice(usable)
            size = min(left if i == most - 1 else rng.randint(0, left), region.size)
            at = rng.randint(0, region.size - size)
            found.append((region.address + at, size, region.real.local))
            places.append((region.buffer, region.start + at, size, region))
            left -= size
        return found, places, total - left

    def get(self, places):
        return b"".join(bytes(self.model[b][at : at + size]) for b, at, size, _ in places)

    def put(self, places, data):
        for buffer, at, size, _ in places:
            piece, data = data[:size], data[size:]
            self.model[buffer][at : at + len(piece)] = piece

    def check(self):
        for number, (real, model) in enumerate(zip(self.real, self.model, strict=True)):
            if ffi.buffer(real)[0:SIZE] != model:
                seen = bytes(ffi.buffer(real)[0:SIZE])
                first = next(i for i in range(SIZE) if seen[i] != model[i])
                raise AssertionError(f"buffer {number} differs from byte {first}")


class End:
    """One end of a connection."""

    def __init__(self, machine, number):
        self.machine, self.number = machine, number
        node = machine.node
        self.cq = node.cq(512)
        self.qp = node.qp(self.cq, context=number, depth=32, inline=236)
        self.connector = node.connector()
        self.receives: list[tuple[int, list]] = []
        self.expected: list[tuple] = []  # of initiator requests
        self.arrived: list[tuple] = []  # of Receives
        self.context = 0

    def next(self):
        self.context += 1
        return self.context

    def release(self):
        for thing in (self.connector, self.qp, self.cq):
            thing.release()
        for window in self.machine.windows:
            if window.end is self:
                self.machine.stale.append((window.token, window.address))
                window.end = None

    def check(self):
        """Check that all completions equal the model's, in order."""
        count = len(self.expected) + len(self.arrived)
        done = []

        def all_there():
            done.extend(get_results(self.cq, 64))
            return len(done) >= count

        wait_until(all_there, f"{count} completions of end {self.number}, {done}")
        initiator = [(d.kind, d.status, d.context) for d in done if d.kind != Kind.RECEIVE]
        receives = [
            (d.status, d.context, d.bytes if d.status == Status.SUCCESS else None)
            for d in done
            if d.kind == Kind.RECEIVE
        ]
        assert initiator == self.expected
        assert receives == self.arrived
        assert {d.queue_pair for d in done} <= {self.number}
        self.expected, self.arrived = [], []


class Link:
    """A connection between the two machines, made again whenever it ends."""

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.open()

    def open(self):
        world = self.world
        self.ends = [End(machine, 10 * self.number + i) for i, machine in enumerate(world.machines)]
        self.dead = False
        order = self.ends if world.rng.random() < 0.5 else self.ends[::-1]
        active, passive = order
        kit = world.kit
        listener = world.listeners[world.machines.index(passive.machine)]
        arrived = kit.issue(listener, "GetConnectionRequest", passive.connector)
        limits = (world.rng.randint(1, 16), world.rng.randint(1, 16))
        connecting = connect(kit, active.connector, active.qp, get_address(listener, "GetLocalAddress"), limits)
        assert arrived.result() == Status.SUCCESS
        accepting = accept(kit, passive.connector, passive.qp, limits)
        assert connecting.result() == Status.SUCCESS
        assert kit.do(active.connector, "CompleteConnect") == Status.SUCCESS
        assert accepting.result() == Status.SUCCESS

    def end(self):
        """The connection has ended: everything posted is canceled."""
        self.dead = True
        for end in self.ends:
            for context, places in end.receives:
                end.arrived.append((Status.CANCELED, context, None))
                unpin(places)
            end.receives = []

    def renew(self):
        order = self.ends if self.world.rng.random() < 0.5 else self.ends[::-1]
        for end in order:
            end.release()
        self.open()

    def check(self):
        for end in self.ends:
            end.check()
        if self.dead:
            self.renew()


def unpin(places):
    for _, _, _, region in places:
        region.pins -= 1


class World:
    def __init__(self, kit, rng):
        self.kit, self.rng = kit, rng
        self.machines = [Machine(kit, rng) for _ in range(2)]
        self.listeners = [machine.node.listener() for machine in self.machines]
        self.links = [Link(self, i) for i in range(3)]
        self.operations = 0
        self.log: list[tuple] = []

    # Actions of a program other than requests

    def registrations(self):
        machine = self.rng.choice(self.machines)
        idle = [r for r in machine.regions if not r.pins]
        if len(machine.regions) > 8 or (idle and self.rng.random() < 0.5 and len(machine.regions) > 3):
            if idle:
                machine.deregister(self.rng.choice(idle))
        else:
            machine.register(None if self.rng.random() < 0.5 else Mr.EVERYTHING)
        self.operations += 1

    def disconnect(self):
        link = self.rng.choice(self.links)
        end = self.rng.choice(link.ends)
        how = self.rng.choice(["disconnect", "flush", "release"])
        if how == "flush":
            for context, places in end.receives:
                end.arrived.append((Status.CANCELED, context, None))
                unpin(places)
            end.receives = []
            assert end.qp.Flush() == Status.SUCCESS
            end.check()
        link.end()
        if how == "release":
            end.connector.release()
            end.qp.release()
        else:
            assert self.kit.do(end.connector, "Disconnect") == Status.SUCCESS
        link.check()
        self.operations += 1

    # Requests

    def receive(self, end, least):
        total = least + self.rng.randint(0, 512) if self.rng.random() > 0.01 else self.rng.randint(0, least)
        found = end.machine.elements(total, write=True)
        if not found:
            return False
        elements, places, room = found
        if room < least and self.rng.random() > 0.02:
            return False
        context = end.next()
        assert end.qp.Receive(pointer(context), sges(*elements), len(elements)) == Status.SUCCESS
        for place in places:
            place[3].pins += 1
        end.receives.append((context, places))
        self.operations += 1
        return True

    def flags(self, last):
        return Op.SILENT_SUCCESS if not last and self.rng.random() < 0.4 else Op.NONE

    def note(self, link, end, kind, context, flags, status=Status.SUCCESS, details=()):
        """Note the completion that must follow, and what an error ends."""
        if link.dead:
            status = Status.CANCELED
        self.log.append((kind.name, int(end.number), context, str(flags), status, *details))
        if status != Status.SUCCESS or not flags & Op.SILENT_SUCCESS:
            end.expected.append((kind, status, context))
        self.operations += 1

    def send(self, link, end, other, fence, last):
        rng = self.rng
        flags = self.flags(last) | fence | (Op.SOLICIT if rng.random() < 0.2 else 0)
        # The call copies inline bytes, before a Read under way may change them.
        inline = not fence and rng.random() < 0.3
        size = rng.randint(0, 236 if inline else rng.choice([16, 1000, SIZE]))
        elements, places, size = end.machine.elements(size, write=False)
        if inline:
            flags |= Op.INLINE
            elements = [(address, length, 0xBAD) for address, length, _ in elements]
        if not link.dead and not other.receives and not self.receive(other, size):
            return False
        context = end.next()
        assert end.qp.Send(pointer(context), sges(*elements), len(elements), flags) == Status.SUCCESS
        if link.dead:
            self.note(link, end, Kind.SEND, context, flags)
            return True
        theirs, sink = other.receives.pop(0)
        unpin(sink)
        data = end.machine.get(places)
        if size > sum(place[2] for place in sink):
            self.note(link, end, Kind.SEND, context, flags, Status.DATA_OVERRUN)
            other.arrived.append((Status.BUFFER_OVERFLOW, theirs, None))
            link.end()
            # The contract does not say which bytes a refused message leaves in the Receive, so the model copies them.
            self.resync = other.machine
        else:
            details = ([p[:3] for p in places], [p[:3] for p in sink])
            self.note(link, end, Kind.SEND, context, flags, details=details)
            other.machine.put(sink, data)
            other.arrived.append((Status.SUCCESS, theirs, size))
        return True

    def target(self, end, other, write):
        """Return (granted, token, address, size, places) of something on the other machine to read or write."""
        rng, machine = self.rng, other.machine
        window = rng.choice(machine.windows)
        region = rng.choice(machine.regions)
        if window.end and rng.random() < 0.6:
            thing, granted, token = window, window.end is other, window.token
            buffer, start, address, size = window.buffer, window.start, window.address, window.size
        elif machine.stale and rng.random() < 0.02:
            token, address = rng.choice(machine.stale[-50:])
            return False, token, address, 1, []
        else:
            thing, granted, token = region, True, region.real.remote
            buffer, start, address, size = region.buffer, region.start, region.address, region.size
        granted = granted and thing.allows(write)
        if not granted and rng.random() > 0.03:
            return None
        at, length = rng.randint(0, size), 0
        length = rng.randint(0, size - at)
        if rng.random() < 0.01:
            granted = False
            at, length = rng.choice([(-1, 1), (0, size + 1), (size, 1), (-5, size)])
        return granted or length == 0, token, address + at, length, [(buffer, start + at, length, None)]

    def transfer(self, link, end, other, write, fence, last):
        target = self.target(end, other, write)
        if not target:
            return False
        granted, token, address, size, theirs = target
        found = end.machine.elements(size, write=not write)
        if not found:
            return False
        elements, mine, got = found
        if got != size:
            if not granted or not theirs:
                return False
            size = got
            theirs = [(theirs[0][0], theirs[0][1], size, None)]
        flags = self.flags(last) | fence
        context = end.next()
        if write:
            code = end.qp.Write(pointer(context), sges(*elements), len(elements), address, token, flags)
        else:
            code = end.qp.Read(pointer(context), sges(*elements), len(elements), address, token, flags)
        assert code == Status.SUCCESS
        kind = Kind.WRITE if write else Kind.READ
        if link.dead or granted:
            if not link.dead and write:
                other.machine.put(theirs, end.machine.get(mine))
            elif not link.dead:
                end.machine.put(mine, other.machine.get(theirs))
            self.note(link, end, kind, context, flags, details=([p[:3] for p in mine], [p[:3] for p in theirs]))
        else:
            self.note(link, end, kind, context, flags, Status.ACCESS_VIOLATION)
            link.end()
        return True

    def window(self, link, end, fence, last):
        rng, machine = self.rng, end.machine
        if link.dead:
            return False
        window = rng.choice(machine.windows)
        flags = self.flags(last) | fence
        context = end.next()
        if window.end is None and rng.random() > 0.01:
            region = rng.choice(machine.regions)
            rights = rng.choice([0, Op.ALLOW_READ, Op.ALLOW_WRITE, Op.ALLOW_READ | Op.ALLOW_WRITE])
            at = rng.randrange(region.size)
            size = rng.randint(1, region.size - at) if rng.random() > 0.02 else region.size - at + 1
            inside = at + size <= region.size
            code = end.qp.Bind(
                pointer(context),
                raw(region.real.mr),
                raw(window.real),
                pointer(region.address + at),
                size,
                flags | rights,
            )
            self.operations += 1
            if not inside or (rights & Op.ALLOW_WRITE and not region.flags & 1):
                assert code == Status.ACCESS_VIOLATION
                return False
            assert code == Status.SUCCESS
            window.end, window.region, window.flags = end, region, rights
            window.buffer, window.start, window.size = region.buffer, region.start + at, size
            window.address, window.token = region.address + at, window.real.GetRemoteToken()
            self.note(link, end, Kind.BIND, context, flags)
            return True
        if window.end is not end and rng.random() > 0.01:
            return False
        assert end.qp.Invalidate(pointer(context), raw(window.real), flags) == Status.SUCCESS
        if window.end is end:
            machine.stale.append((window.token, window.address))
            window.end = None
            self.note(link, end, Kind.INVALIDATE, context, flags)
        else:
            self.note(link, end, Kind.INVALIDATE, context, flags, Status.INVALID_DEVICE_REQUEST)
            link.end()
        return True

    def batch(self):
        link = self.rng.choice(self.links)
        number = self.rng.randrange(2)
        end, other = link.ends[number], link.ends[1 - number]
        fence = Op.NONE
        count, done = self.rng.randint(1, 8), 0
        self.resync = None
        self.log.clear()
        while done < count:
            last = done == count - 1
            what = self.rng.random()
            if what < 0.35:
                posted = self.send(link, end, other, fence, last)
            elif what < 0.6:
                posted = self.transfer(link, end, other, True, fence, last)
            elif what < 0.8:
                posted = self.transfer(link, end, other, False, fence, last)
                if posted:
                    fence = Op.READ_FENCE
            else:
                posted = self.window(link, end, fence, last)
            done += bool(posted)
            if link.dead and self.rng.random() < 0.5:
                break
        link.check()
        if self.resync:
            for real, model in zip(self.resync.real, self.resync.model, strict=True):
                model[:] = ffi.buffer(real)[0:SIZE]
        for machine in self.machines:
            machine.check()


def test_random_operations_agree_with_the_model(kit, rng):
    world = World(kit, rng)
    step = 0
    try:
        while world.operations < OPERATIONS:
            step += 1
            what = rng.random()
            if what < 0.9:
                world.batch()
            elif what < 0.98:
                world.registrations()
            else:
                world.disconnect()
            kit.kept.clear()
    except BaseException:
        print(f"step {step}, {world.operations} operations; the last batch:")
        for entry in world.log:
            print("   ", *entry)
        raise
