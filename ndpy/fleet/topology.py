"""Which ends share a leaf, a rail, or another part of the network: from a file, or from what `lldp.py` found.

A file is TOML, or Slurm's topology.conf. In TOML each table is a kind of group, and each of its keys a group's name:

    [leaf]
    l1 = "n[01-32]"
    l2 = ["n[33-64]", "spare1"]

    [rail]
    0 = "*/mlx5_0"
    1 = "*/mlx5_1"

A member is a set of nodes, or such a set and an adapter's name after a slash. A star is all nodes.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ndpy.fleet.results import End

#: More nodes than this in one set are taken for a mistake.
MOST_NODES = 100_000


class TopologyError(ValueError):
    """A topology that cannot be used. The message says where, and which node."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Who shares what.

    Attributes:
        groups: the groups of (node, adapter), such as "leaf l3". The adapter "" is all adapters of a node, and the node
            "*" all nodes.
        source: the file, "LLDP", or "" if nothing is known.
    """

    groups: Mapping[tuple[str, str], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    source: str = ""

    def place(self, ends: Sequence[End]) -> tuple[End, ...]:
        """The ends with their groups. Of two groups of one kind, that of the adapter itself is taken."""
        return tuple(dataclasses.replace(end, groups=self._of(end)) for end in ends)

    def _of(self, end: End) -> tuple[str, ...]:
        found: dict[str, list[str]] = {}
        for key in ((end.node, end.adapter), ("*", end.adapter), (end.node, ""), ("*", "")):
            known = self.groups.get(key, ())
            new = {kind_of(group) for group in known} - set(found)
            for group in known:
                if kind_of(group) in new:
                    found.setdefault(kind_of(group), []).append(group)
        return tuple(itertools.chain(*found.values()))

    def missing(self, ends: Sequence[End]) -> tuple[str, ...]:
        """The nodes of which nothing is known, sorted and each once."""
        return tuple(sorted({end.node for end in self.place(ends) if not end.groups}))


def kind_of(group: str) -> str:
    """The kind of a group: "leaf" of "leaf l3"."""
    return group.partition(" ")[0]


def unknown() -> Topology:
    """A topology of which nothing is known."""
    return Topology()


def node_set(text: str) -> list[str]:
    """The nodes of a set such as "n[001-032,40],login1", in its order.

    Raises:
        TopologyError: the set cannot be read, or has more than MOST_NODES nodes.
    """
    nodes: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", part.strip())
        if not part.strip() or any(re.search(r"[\s\[\]]", piece) for piece in pieces[::2]):
            raise TopologyError(f"{text!r:.80} is not a set of nodes such as n[01-32],login1")
        ranges = [[piece] if at % 2 == 0 else list(_numbers(piece, text)) for at, piece in enumerate(pieces)]
        for words in itertools.product(*ranges):
            nodes.append("".join(words))
            if len(nodes) > MOST_NODES:
                raise TopologyError(f"{text!r:.80} has more than {MOST_NODES} nodes")
    return nodes


def _numbers(text: str, whole: str) -> Iterator[str]:
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise TopologyError(f"{part!r:.40} in {whole!r:.80} is not a range of numbers such as 01-32")
        if int(match[2] or match[1]) - int(match[1]) >= MOST_NODES:
            raise TopologyError(f"{whole!r:.80} has more than {MOST_NODES} nodes")
        width = len(match[1])
        yield from (str(number).zfill(width) for number in range(int(match[1]), int(match[2] or match[1]) + 1))


def read(path: str | Path) -> Topology:
    """The topology of a file: TOML, or Slurm's topology.conf.

    Raises:
        TopologyError: the file cannot be read or understood. The message has its name, the line and the node.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(f"{path}: the topology cannot be read: {error}") from None
    slurm = re.search(r"(?im)^\s*(SwitchName|BlockName)\s*=", text)
    return _read_slurm(str(path), text) if slurm else _read_toml(str(path), text)


class _Members:
    """The groups that were read so far, and where each member was named."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.groups: dict[tuple[str, str], list[str]] = {}
        self._seen: dict[tuple[str, str, str], tuple[str, int]] = {}

    def add(self, group: str, line: int, nodes: str, adapter: str = "") -> list[str]:
        try:
            names = ["*"] if nodes == "*" else node_set(nodes)
        except TopologyError as error:
            raise TopologyError(f"{self.path}:{line}: {group}: {error}") from None
        for node in names:
            before = self._seen.setdefault((kind_of(group), node, adapter), (group, line))
            if before[0] != group:
                name = f"{node}/{adapter}" if adapter else node
                raise TopologyError(
                    f"{self.path}:{line}: {name} is in {group}, and in {before[0]} by line {before[1]}. Remove it from "
                    "one."
                )
            if group not in self.groups.setdefault((node, adapter), []):
                self.groups[node, adapter].append(group)
        return names

    def done(self) -> Topology:
        return Topology({key: tuple(groups) for key, groups in self.groups.items()}, self.path)


def _read_toml(path: str, text: str) -> Topology:
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise TopologyError(
            f'{path}: to read TOML, this Python needs the package tomli: pip install "ndpy[fleet]"'
        ) from None
    try:
        tables = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise TopologyError(f"{path}: neither TOML nor Slurm's topology.conf: {error}") from None
    members = _Members(path)
    for kind, table in tables.items():
        if not isinstance(table, dict) or " " in kind:
            raise TopologyError(
                f"{path}:{_line(text, '', kind)}: {kind!r:.40} is not a table of groups such as [leaf] with l1 = "
                '"n[1-32]"'
            )
        for name, values in table.items():
            line = _line(text, kind, name)
            for value in values if isinstance(values, list) else [values]:
                if not isinstance(value, str):
                    raise TopologyError(f"{path}:{line}: {kind} {name}: {value!r:.40} is not a set of nodes in quotes")
                nodes, _, adapter = value.partition("/")
                members.add(f"{kind} {name}", line, nodes.strip(), adapter.strip())
    return members.done()


def _line(text: str, table: str, key: str) -> int:
    """The line of a key in TOML, or of its table if the key is not found as a word at the beginning of a line."""
    here, start = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[\s*[\"']?([^\]\"']*?)[\"']?\s*\]", line)
        if head:
            here = head[1]
            start = number if here == table else start
        if here == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return start


def _read_slurm(path: str, text: str) -> Topology:
    members = _Members(path)
    above: dict[str, tuple[str, int]] = {}
    leafs: dict[str, list[str]] = {}
    for line, words in _slurm_lines(text):
        fields = {}
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or not value:
                raise TopologyError(f"{path}:{line}: {word!r:.40} is not KEY=VALUE")
            fields[key.lower()] = value.strip('"')
        name = fields.get("switchname") or fields.get("blockname")
        if name is None:
            if "blocksizes" in fields:
                continue
            raise TopologyError(f"{path}:{line}: neither SwitchName= nor BlockName= begins the line")
        if "nodes" in fields:
            kind = "leaf" if "switchname" in fields else "block"
            leafs.setdefault(name, []).extend(members.add(f"{kind} {name}", line, fields["nodes"]))
        if "switches" in fields:
            try:
                below = node_set(fields["switches"])
            except TopologyError as error:
                raise TopologyError(f"{path}:{line}: switch {name}: {error}") from None
            for switch in below:
                above.setdefault(switch, (name, line))
        if "nodes" not in fields and "switches" not in fields:
            raise TopologyError(f"{path}:{line}: switch {name} has neither Nodes= nor Switches=")
    _add_upper(members, above, leafs)
    return members.done()


def _add_upper(members: _Members, above: Mapping[str, tuple[str, int]], leafs: Mapping[str, Sequence[str]]) -> None:
    """Add the switches above the leafs, except those that reach all nodes: they tell nobody from anybody."""
    reach: dict[str, tuple[int, list[str]]] = {}
    for leaf, nodes in leafs.items():
        switch, visited = leaf, {leaf}
        while switch in above:
            switch, line = above[switch]
            if switch in visited:
                raise TopologyError(f"{members.path}:{line}: switch {switch} is above itself")
            visited.add(switch)
            reach.setdefault(switch, (line, []))[1].extend(nodes)
    everyone = sum(map(len, leafs.values()))
    for switch, (_, nodes) in reach.items():
        if len(nodes) < everyone:
            for node in nodes:
                members.groups[node, ""].append(f"switch {switch}")


def _slurm_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    began, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].rstrip()
        began = began or number
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        words = (joined + line).split()
        if words:
            yield began, words
        began, joined = 0, ""
    if joined.split():
        yield began, joined.split()


def from_lldp(
    switches: Mapping[str, Mapping[str, str]], interfaces: Mapping[tuple[str, str], str] | None = None
) -> Topology:
    """The leafs that the nodes' switches announce.

    Parameters:
        switches: of each node, the switch at each network interface: what lldp.switches() found there.
        interfaces: the network interface of (node, adapter). Without it, a node with several leafs is left out.
    """
    groups: dict[tuple[str, str], tuple[str, ...]] = {}
    for node, leafs in switches.items():
        if len(set(leafs.values())) == 1:
            groups[node, ""] = (f"leaf {next(iter(leafs.values()))}",)
    for (node, adapter), interface in (interfaces or {}).items():
        if interface in switches.get(node, {}):
            groups[node, adapter] = (f"leaf {switches[node][interface]}",)
    return Topology(groups, "LLDP")
