"""What a session keeps of a search: one record in the extras of the root's branch, which is written as a whole.

A step is there when its record is. Everything else that a step did can be told from it, and put right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from agentmem.errors import CorruptionError
from agentmem.reasons import Reason
from agentmem.search.node import Node, NodeState

KEY = "search"
"""Where in the extras of its branches a search keeps what it needs to know again; `score` beside it holds the score."""

FORMAT = 1
"""Version of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """All that is kept of a search.

    Attributes:
        name: The search's name.
        policy: The policy's repr.
        seed: The search's seed.
        num_steps: Whole steps.
        peak_nbytes: The most bytes of KV that the nodes ever held.
        stopped: Why it ended.
        nodes: All nodes there ever were.
    """

    name: str
    policy: str
    seed: int
    num_steps: int = 0
    peak_nbytes: int = 0
    stopped: Reason = Reason.RUNNING
    nodes: tuple[Node, ...]


def pack(stored: Stored) -> dict[str, object]:
    """Return what is kept as plain data. A node takes about 60 bytes of the megabyte that extras may have."""
    return {
        **mark(stored.name),
        "format": FORMAT,
        "policy": stored.policy,
        "seed": str(stored.seed),  # any int, where msgpack ends at 64 bits
        "steps": stored.num_steps,
        "peak_nbytes": stored.peak_nbytes,
        "stopped": stored.stopped.value,
        "nodes": [_row(node) for node in stored.nodes],
    }


def unpack(fields: object, name: str) -> Stored | None:
    """Return what a branch's extras, under `KEY`, say of the search `name`; None when they are no record of it.

    Raises:
        CorruptionError: It is a record that this version cannot read.
    """
    if not isinstance(fields, Mapping) or not is_marked(fields, name) or "nodes" not in fields:
        return None
    try:
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']!r}, this version reads {FORMAT}")
        nodes: list[Node] = []
        for row in cast("list[list[object]]", fields["nodes"]):
            nodes.append(_node(row, nodes))
        return Stored(
            name=name,
            policy=str(fields["policy"]),
            seed=int(cast("str", fields["seed"])),
            num_steps=int(cast("int", fields["steps"])),
            peak_nbytes=int(cast("int", fields["peak_nbytes"])),
            stopped=Reason(cast("str", fields["stopped"])),
            nodes=tuple(nodes),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptionError(
            f"the record of search {name!r} cannot be read ({error!r}): drop branch {name!r}, or begin another search"
        ) from error


def mark(name: str, node: Node | None = None) -> dict[str, object]:
    """Return what stands under `KEY` in the extras of a node's branch and checkpoint; of the root's, without a node."""
    if node is None:
        return {"name": name, "node": 0}
    return {"name": name, "node": node.number, "parent": node.parent, "index": node.index, "depth": node.depth}


def is_marked(fields: object, name: str) -> bool:
    """Say whether a branch belongs to the search `name`, or was forked from one that does."""
    return isinstance(fields, Mapping) and fields.get("name") == name


def _row(node: Node) -> list[object]:
    return [
        node.parent,
        node.index,
        node.checkpoint_id,
        node.score,
        node.num_tokens,
        node.num_fed,
        node.step,
        node.state.value,
    ]


def _node(row: list[object], before: list[Node]) -> Node:
    parent, index, checkpoint_id, score, num_tokens, num_fed, step, state = row
    above = None if parent is None else before[cast("int", parent)]
    return Node(
        number=len(before),
        parent=None if above is None else above.number,
        index=cast("int", index),
        depth=0 if above is None else above.depth + 1,
        checkpoint_id=cast("bytes", checkpoint_id),
        score=float(cast("float", score)),
        num_tokens=cast("int", num_tokens),
        num_fed=cast("int", num_fed),
        step=cast("int", step),
        state=NodeState(cast("str", state)),
    )
