"""Several protection domains of one adapter, which keep memory apart."""

from __future__ import annotations

import gc

import pytest
from kit.helpers import (
    DEADLINE_S,
    assert_refused,
    assert_works,
    connect_ends,
    contents,
    create_end,
    memory,
    peer_of,
    require,
    succeed,
    wait_until,
)

import ndpy
from ndpy import Access, Batch, Capability, Operation

RIGHTS = Access.REMOTE_READ | Access.REMOTE_WRITE


@pytest.fixture
def domains(adapter, keep):
    """Two protection domains."""
    require(adapter, Capability.PROTECTION_DOMAINS)
    return keep(adapter.create_protection_domain()), keep(adapter.create_protection_domain())


@pytest.fixture
def ours(domains):
    return domains[0]


@pytest.fixture
def pair(adapter, keep, ours):
    """A client in the adapter's first domain, connected to a queue pair of ours."""
    if peer_of(adapter) is not adapter:
        pytest.skip("the other end is on another host")
    return connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, ours))


def test_a_domain_is_an_adapter(adapter, ours):
    assert isinstance(ours, ndpy.Adapter)
    assert ours.device is adapter
    assert ours.info is adapter.info
    assert ours.port_state == adapter.port_state
    assert repr(ours) == f"<ProtectionDomain of {adapter.info.name}>"
    with ours.create_protection_domain() as another:
        assert another.device is adapter
    assert another.closed


def test_connections_cross_domains(keep, pair):
    assert_works(keep, pair)


def test_memory_of_another_domain_cannot_be_used(adapter, keep, domains, pair):
    one, two = domains
    queue_pair = pair.server.queue_pair
    for foreign in (memory(keep, adapter, 64, RIGHTS), memory(keep, two, 64, RIGHTS)):
        batch = Batch(1)
        batch.send(foreign)
        calls = {
            queue_pair.send: (foreign,),
            queue_pair.receive: (foreign[8:16],),
            queue_pair.read: (foreign, foreign.remote()),
            queue_pair.receive_many: ([foreign],),
            queue_pair.post: (batch,),
        }
        for call, arguments in calls.items():
            with pytest.raises(
                ndpy.ForeignObjectError, match=f"another protection domain of {adapter.info.name} than this"
            ):
                call(*arguments)
    queue_pair.receive(memory(keep, one, 64), context=3)


def test_a_peer_reaches_only_memory_of_the_queue_pair_s_domain(adapter, keep, domains, pair):
    one, two = domains
    near = memory(keep, adapter, b"intruder", Access.NONE)
    target = memory(keep, one, 8, RIGHTS)
    pair.client.queue_pair.write(near, target.remote())
    succeed(pair.client.cq)
    assert contents(target) == b"intruder"
    secret = memory(keep, two, b"secret!!", RIGHTS)
    pair.client.queue_pair.write(near, secret.remote(), context=7)
    assert_refused(pair.client, Operation.WRITE, 7)
    assert contents(secret) == b"secret!!"


def test_a_region_moves_to_another_domain(adapter, keep, domains, pair):
    require(adapter, Capability.REREGISTRATION)
    one, two = domains
    target = bytearray(8)
    region = keep(two.register(target, RIGHTS))
    region.reregister(domain=one)
    assert region.adapter is one
    pair.client.queue_pair.write(memory(keep, adapter, b"welcome!", Access.NONE), region.remote())
    succeed(pair.client.cq)
    assert target == b"welcome!"
    region.reregister(domain=two)
    pair.client.queue_pair.write(memory(keep, adapter, b"intruder", Access.NONE), region.remote(), context=7)
    assert_refused(pair.client, Operation.WRITE, 7)
    assert target == b"welcome!"


def test_queues_serve_several_domains(adapter, keep, domains):
    cq = keep(adapter.create_completion_queue(16))
    ends = [create_end(keep, domain, cq=cq) for domain in domains]
    if peer_of(adapter) is adapter:
        pair = connect_ends(keep, adapter, *ends)
        one, two = (memory(keep, domain, b"to and fro") for domain in domains)
        pair.server.queue_pair.receive(two)
        pair.client.queue_pair.send(one)
        succeed(cq, 2)
    with pytest.raises(ndpy.DeviceBusyError, match="QueuePair"):
        cq.close()


def test_what_holds_memory_belongs_to_one_domain(adapter, keep, domains):
    one, two = domains
    cq = keep(one.create_completion_queue(4))
    if Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
        shared = keep(one.create_shared_receive_queue(4))
        with pytest.raises(ndpy.ForeignObjectError, match="another protection domain"):
            two.create_queue_pair(cq, srq=shared)
        keep(one.create_queue_pair(cq, srq=shared))
        with pytest.raises(ndpy.ForeignObjectError, match="another protection domain"):
            shared.receive(memory(keep, two, 8))
    cache = keep(ndpy.RegistrationCache(two, max_bytes=1 << 20, max_entries=4))
    with pytest.raises(ndpy.ForeignObjectError, match="another protection domain"):
        cache.remote(bytearray(4096), keep(one.create_queue_pair(cq)))
    with cache.local(bytearray(4096)) as lease:
        keep(two.create_queue_pair(cq)).receive(lease.region)


def test_a_window_belongs_to_one_domain(adapter, keep, domains):
    require(adapter, Capability.MEMORY_WINDOWS)
    one, two = domains
    window = keep(one.create_memory_window())
    queue_pair = keep(two.create_queue_pair(keep(two.create_completion_queue(4))))
    with pytest.raises(ndpy.ForeignObjectError, match="the window belongs to another protection domain"):
        queue_pair.bind(window, memory(keep, two, 64), access=Access.REMOTE_READ)


def test_objects_of_another_adapter_are_foreign(adapter, keep, ours):
    other = keep(ndpy.open_adapter(adapter.info.name))
    domain = keep(other.create_protection_domain())
    for foreign in (other, domain):
        with pytest.raises(ndpy.ForeignObjectError, match="another open adapter"):
            ours.create_queue_pair(keep(foreign.create_completion_queue(4)))


def test_closing_goes_from_the_inside(adapter, keep):
    require(adapter, Capability.PROTECTION_DOMAINS)
    device = ndpy.open_adapter(adapter.info.name)
    domain = device.create_protection_domain()
    region = domain.register(bytearray(64))
    with pytest.raises(
        ndpy.DeviceBusyError, match=f"Adapter {adapter.info.name} is in use by ProtectionDomain of {adapter.info.name}"
    ):
        device.close()
    with pytest.raises(ndpy.DeviceBusyError, match=r"ProtectionDomain of .* is in use by MemoryRegion"):
        domain.close()
    region.close()
    domain.close()
    domain.close()
    with pytest.raises(ndpy.ClosedError):
        domain.register(bytearray(64))
    # The adapter and its thread go on.
    assert device._events._thread.is_alive()
    with device.register(bytearray(64)):
        pass
    device.close()
    with pytest.raises(ndpy.ClosedError):
        device.create_protection_domain()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_dropped_domain_is_closed_with_its_objects(adapter):
    require(adapter, Capability.PROTECTION_DOMAINS)
    device = ndpy.open_adapter(adapter.info.name)
    domain = device.create_protection_domain()
    kept = [domain.register(bytearray(64)), domain.create_completion_queue(4)]
    kept.append(domain.create_queue_pair(kept[1]))
    serial = domain._serial
    del domain
    gc.collect()
    assert device._is_used
    kept.clear()

    def is_gone():
        gc.collect()
        return device._own_child(serial) is None

    wait_until(is_gone, "the end of the domain")
    device.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_closing_the_adapter_closes_what_was_dropped(adapter):
    require(adapter, Capability.PROTECTION_DOMAINS)
    device = ndpy.open_adapter(adapter.info.name)
    domain = device.create_protection_domain()
    domain.register(bytearray(64))
    del domain
    device.close()
    assert device.closed
    assert device._open_children() == []


def test_registering_together(keep, ours):
    pendings = [ours.begin_register(bytearray(1 << 16)) for _ in range(8)]
    regions = [keep(pending.result(DEADLINE_S)) for pending in pendings]
    assert {region.adapter for region in regions} == {ours}


def test_listeners_of_a_domain_hear(adapter, keep, ours):
    if peer_of(adapter) is not adapter:
        pytest.skip("the other end is on another host")
    pair = connect_ends(keep, adapter, create_end(keep, ours), create_end(keep, ours))
    assert_works(keep, pair)
    pair.client.connector.disconnect(DEADLINE_S)
    pair.server.connector.wait_disconnected(DEADLINE_S)


def test_an_adapter_without_them_says_so(adapter):
    if Capability.PROTECTION_DOMAINS in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} has protection domains")
    with pytest.raises(ndpy.UnsupportedError, match="has no PROTECTION_DOMAINS"):
        adapter.create_protection_domain()
