"""What is left of a session's records when some of them are lost.

Pure functions over records: nothing is guessed, and no token is made up. Knows nothing of storage.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator

from agentmem.ids import BlockDigest, CheckpointId
from agentmem.tree import rows
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move


class History:
    """A session's moves, and what they tell of branches and checkpoints that are lost."""

    def __init__(self, moves: list[Move]) -> None:
        """Remember the moves of a session, which come oldest first."""
        self._moves = moves[::-1]
        self._before = {move.new: move.old for move in moves if move.operation == "checkpoint"}

    def alive(self) -> set[str]:
        """Return the branches whose last move did not drop them."""
        last = {move.branch: move for move in reversed(self._moves)}
        return {name for name, move in last.items() if move.operation != "drop"}

    def tip(self, branch: str) -> CheckpointId | None:
        """Return where a branch stood last."""
        return next((move.new for move in self._moves if move.branch == branch), None)

    def nearest(self, branch: BranchRecord, is_readable: Callable[[CheckpointId], bool]) -> CheckpointId | None:
        """Return the checkpoint nearest to a branch's tip that can be read: before it, or where the branch was last."""
        known = [move.new for move in self._moves if move.branch == branch.name]
        known += [move.old for move in self._moves if move.branch == branch.name]
        places = [place for place in (*self._lineage(branch.tip), *known) if place is not None]
        return next((place for place in places if is_readable(place)), None)

    def _lineage(self, tip: CheckpointId | None) -> Iterator[CheckpointId]:
        seen: set[CheckpointId] = set()
        while tip is not None and tip not in seen:
            yield tip
            seen.add(tip)
            tip = self._before.get(tip)


def complete(readable: dict[bytes, Checkpoint]) -> dict[bytes, Checkpoint]:
    """Return the checkpoints all of whose tokens are in readable records: their own, their parents' and so on."""
    children: dict[bytes | None, list[bytes]] = {}
    for node, each in readable.items():
        parent = None if each.parent_id is None else rows.node_key(each.session_id, each.parent_id)
        children.setdefault(parent, []).append(node)
    complete: dict[bytes, Checkpoint] = {}
    todo: list[tuple[bytes, int]] = [(node, 0) for node in children.get(None, ())]
    while todo:
        node, num_before = todo.pop()
        checkpoint = readable[node]
        if num_before + checkpoint.num_own_tokens == checkpoint.num_tokens:
            complete[node] = checkpoint
            todo.extend((child, checkpoint.num_tokens) for child in children.get(node, ()))
    return complete


def without_lost(checkpoint: Checkpoint, stored: Collection[BlockDigest], block_size: int) -> Checkpoint:
    """Return a checkpoint that names, of its KV and layer states, only what is stored and of use.

    Its tokens after that count as not fed, so that whoever goes on from it computes them again.
    """
    lost = [index for index, block in enumerate(checkpoint.blocks) if block.digest not in stored]
    blocks = checkpoint.blocks[: lost[0]] if lost else checkpoint.blocks
    is_tail_lost = bool(lost) or (checkpoint.tail is not None and checkpoint.tail.digest not in stored)
    num_fed = checkpoint.num_tokens - checkpoint.num_pending
    if is_tail_lost:
        num_fed = min(num_fed, (checkpoint.first_block + len(blocks)) * block_size)
    states = tuple(state for state in checkpoint.states if all(digest in stored for digest in state.digests))
    tail = None if is_tail_lost else checkpoint.tail
    num_pending = checkpoint.num_tokens - num_fed
    return dataclasses.replace(checkpoint, blocks=blocks, tail=tail, states=states, num_pending=num_pending)
