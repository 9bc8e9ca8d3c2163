"""What belongs to another open adapter is refused by every way in which it could be used."""

from __future__ import annotations

import pytest
from kit.helpers import assert_quiet, assert_works, create_end, memory

import ndpy
from ndpy import Access, ForeignObjectError

OPERATIONS = ("send", "receive", "write", "read")
FORMS = {
    "a region": lambda region: region,
    "a slice": lambda region: region[0:4],
    "a list": lambda region: [region[0:4]],
}


@pytest.fixture
def foreign(keep, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    return memory(keep, other, b"foreign!", Access.LOCAL_WRITE | Access.READ_SINK)


def arguments(operation):
    return (ndpy.RemoteMemory(0x10000, 64, 1),) if operation in ("write", "read") else ()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_region_of_another_adapter_is_refused_by_every_operation(pair, keep, foreign, operation, form):
    with pytest.raises(ForeignObjectError, match="region"):
        getattr(pair.client.queue_pair, operation)(FORMS[form](foreign), *arguments(operation))
    assert_quiet(pair.client.cq, 0.0)
    assert_works(keep, pair)


def test_a_list_is_refused_for_one_element_of_another_adapter(adapter, keep, foreign):
    end = create_end(keep, adapter, max_receive_sge=2)
    own = memory(keep, adapter, bytes(4))
    for elements in ([own[0:1], foreign[0:1]], [foreign[0:1], own[0:1]], [own, foreign]):
        with pytest.raises(ForeignObjectError, match="region"):
            end.queue_pair.receive(elements)
    end.queue_pair.receive([own[0:1], own[1:2]])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_with_a_region_of_another_adapter_is_refused_whole(pair, keep, foreign, operation, place):
    own = memory(keep, pair.adapter, b"12345678", Access.LOCAL_WRITE | Access.READ_SINK)
    batch = ndpy.Batch(2)
    for region in (own, foreign) if place else (foreign, own):
        getattr(batch, operation)(region[0:4], *arguments(operation))
    for _ in range(2):
        with pytest.raises(ForeignObjectError, match="region"):
            pair.client.queue_pair.post(batch)
    assert_quiet(pair.client.cq, 0.0)
    assert_works(keep, pair)
