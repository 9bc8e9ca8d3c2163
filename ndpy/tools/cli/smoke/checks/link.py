"""Group link: whether the two ends fit each other, what each sees of the other, and which packets get through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ndpy
from ndpy import Access, Capability, RetryPolicy, Status
from ndpy.tools.cli.peers import PeerRefused
from ndpy.tools.cli.smoke.catalog import Failure, check
from ndpy.tools.cli.smoke.link_answer import describe_own, view_of
from ndpy.tools.cli.smoke.testbed import SINK, Connection, Testbed, expect, expect_same
from ndpy.tools.cli.smoke.views import describe, disagreements, translated_control
from ndpy.tools.doctor.ends import FAR, NEAR, agreement, compare, roce_payload, set_mtu
from ndpy.tools.doctor.findings import Finding, Verdict
from ndpy.tools.doctor.link import LinkDescription

_PACKETS = (256, 512, 1024, 2048, 4096)
#: Messages of these lengths are moved. The last one takes several packets of any size.
_LENGTHS = (*_PACKETS, 16384)
# Three tries of at least half a second each. A path that loses packets of one size loses all of them.
_SHORT = RetryPolicy(retry_count=2, ack_timeout=17)
_TRANSFER_LIMIT_S = 6.0


@check("link", "ends-agree")
def ends_agree(testbed: Testbed) -> str:
    """MTU, GID type, VLAN, PFC, pause frames and ECN are the same on both ends, as far as the two systems tell."""
    try:
        connection = testbed.connect(retry=_retry(testbed))
        why = ""
    except (Failure, PeerRefused, ndpy.NdpyError) as error:
        connection, why = None, str(error)
    near, far = _links(testbed, connection)
    findings = compare(near, far, connected=connection is not None)
    wrong = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    lines = [_line(finding) for finding in (*wrong, *(finding for finding in findings if finding not in wrong))]
    expect(not wrong, "\n".join([*lines, *([f"there is no connection: {why}"] if why else [])]))
    expect(connection is not None, f"{why}\nthe links: {agreement(near, far)}")
    return "\n".join([agreement(near, far), *(f"WARN {line}" for line in lines)])


def _line(finding: Finding) -> str:
    return f"{finding.message}. {finding.remedy[:1].upper()}{finding.remedy[1:]}"


def _links(testbed: Testbed, connection: Connection | None) -> tuple[LinkDescription, LinkDescription]:
    near = describe_own(testbed.info, None if connection is None else connection.queue_pair)
    return near, testbed.peer.link(None if connection is None else connection.far.number)


def _retry(testbed: Testbed) -> RetryPolicy | None:
    return _SHORT if Capability.RETRY_POLICY in testbed.info.capabilities else None


@check("link", "each-other")
def each_other(testbed: Testbed) -> str:
    """Each end sees the other at the address and the GID that the other says it has."""
    connection = testbed.connect(retry=_retry(testbed))
    control = testbed.peer.control_addresses if testbed.peer_host is not None else (None, None)
    near = view_of(testbed.info, connection.near, control)
    far = connection.far.view()
    wrong = list(disagreements(near, far))
    expect(not wrong, "\n".join(wrong))
    note = translated_control(near, far) if testbed.peer_host is not None else ""
    return f"{NEAR} sees {describe(near)}; {FAR} sees {describe(far)}" + (f"; {note}" if note else "")


@dataclass(frozen=True)
class _Reach:
    """What arrives in one direction. `lost` is the first length that did not arrive, and `why` the reason."""

    arrived: int
    lost: int
    why: str


@check("link", "path-mtu")
def path_mtu(testbed: Testbed) -> str:
    """Packets of every size up to the connection's path MTU get through in both directions, and so do longer
    messages.
    """
    connection = testbed.connect(retry=_retry(testbed))
    near, far = _links(testbed, connection)
    path = connection.queue_pair.path
    mtu = path.mtu if path is not None else 0
    if mtu:
        testbed.figures["path_mtu"] = mtu
    out = _measure(testbed, connection, _write)
    # A request that failed has ended its connection.
    back = _measure(testbed, connection if not out.lost else testbed.connect(retry=_retry(testbed)), _read)
    problems = [
        _explain(reach, sender, receiver, links, mtu)
        for reach, sender, receiver, links in (
            (out, NEAR, FAR, (near, far)),
            (back, FAR, NEAR, (far, near)),
        )
        if reach.lost
    ]
    expect(not problems, "\n".join(problems))
    if not mtu:
        return (
            f"messages of {_LENGTHS[0]} to {_LENGTHS[-1]} bytes arrive in both directions; the size of packets is the "
            f"transport's own matter; {_mtus(near, far)}"
        )
    testbed.figures["largest_packet_to_peer"] = testbed.figures["largest_packet_from_peer"] = mtu
    ports = [end.rdma_mtu for end in (near, far) if end.rdma_mtu]
    note = f", although both ports allow {min(ports)}" if len(ports) == 2 and mtu < min(ports) else ""
    return (
        f"packets of {_LENGTHS[0]} to {mtu} bytes and messages of {_LENGTHS[-1]} arrive in both directions; the "
        f"connection uses path MTU {mtu}{note}; {_mtus(near, far)}"
    )


_Move = Callable[[Testbed, Connection, int], None]


def _measure(testbed: Testbed, connection: Connection, move: _Move) -> _Reach:
    arrived = 0
    for length in _LENGTHS:
        try:
            move(testbed, connection, length)
        except Failure as failure:
            return _Reach(arrived, length, str(failure))
        arrived = length
    return _Reach(arrived, 0, "")


def _write(testbed: Testbed, connection: Connection, length: int) -> None:
    memory = testbed.memory(length, Access.NONE)
    far = testbed.peer_memory(length, Access.REMOTE_WRITE, connection)
    connection.queue_pair.write(memory.region, far.remote)
    _finish(testbed, connection)
    expect_same(far.contents(), memory.contents(), "what arrived")


def _read(testbed: Testbed, connection: Connection, length: int) -> None:
    memory = testbed.memory(length, SINK)
    far = testbed.peer_memory(length, Access.REMOTE_READ, connection)
    connection.queue_pair.read(memory.region, far.remote)
    _finish(testbed, connection)
    expect_same(memory.contents(), far.contents(), "what arrived")


def _finish(testbed: Testbed, connection: Connection) -> None:
    limit_s = testbed.step(_TRANSFER_LIMIT_S)
    ended = connection.near.take(1, limit_s)
    expect(ended, f"nothing within {limit_s:.0f} s")
    expect(ended[0].status is Status.SUCCESS, ended[0].status.name)


def _explain(
    reach: _Reach, sender: str, receiver: str, links: tuple[LinkDescription, LinkDescription], mtu: int
) -> str:
    """Say which packets do not arrive, and which end or what else is the likely reason. links: the sender's, the
    receiver's.
    """
    what = "packets" if mtu and reach.lost <= mtu else "messages"
    some = (
        f"{what} of {reach.arrived} bytes arrive, those of {reach.lost} do not" if reach.arrived else "nothing arrives"
    )
    told = f"from {sender} to {receiver}: {some} ({reach.why}). {_path(mtu)}{_mtus(*links, sender, receiver)}"
    if not reach.arrived:
        return told
    small = [
        (name, end)
        for name, end in zip((sender, receiver), links, strict=True)
        if end.link_mtu and roce_payload(end.link_mtu) < min(reach.lost, mtu or reach.lost)
    ]
    if not small:
        return f"{told}. Both links carry that, so look at the switches and routers between them"
    name, end = min(small, key=lambda pair: pair[1].link_mtu or 0)
    larger = max(link.link_mtu or 0 for link in links)
    place = "this machine" if name == NEAR else FAR
    remedy = f"on {place}: {set_mtu(end, max(larger, 4200))}"
    return (
        f"{told}. Probably {name} is wrong; its link carries packets of {roce_payload(end.link_mtu or 0)} bytes; "
        f"{remedy}"
    )


def _path(mtu: int) -> str:
    return f"The connection uses path MTU {mtu}; " if mtu else ""


def _mtus(first: LinkDescription, second: LinkDescription, one: str = NEAR, other: str = FAR) -> str:
    def told(end: LinkDescription) -> str:
        return f"{end.link_mtu or 'not known'}{f' ({end.netdev})' if end.netdev else ''}"

    return f"link MTU of {one} {told(first)}, of {other} {told(second)}"
