"""What several branches share of their KV, and what each has alone: the plan that a frontier is made from.

Copies nothing. Knows nothing of tokens' values, of blocks or of sessions.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentmem.tiers.device import Workspace
from agentmem.tiers.runs import Cursor, Run, Storage


@dataclass(frozen=True, slots=True)
class Place:
    """Where a branch's KV is.

    Attributes:
        workspace: Of its session.
        cursor: The branch's own; the frontier moves it.
        alias: A cursor of another session with the same leading tokens, and its workspace: there they are shared.
    """

    workspace: Workspace
    cursor: Cursor
    alias: "tuple[Workspace, Cursor] | None" = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens [low, high) of a path, in one run of a workspace's."""

    workspace: Workspace
    run: Run
    low: int
    high: int

    def memory(self) -> tuple[Storage, int]:
        """Return the storage that has the tokens, and the slot of the first."""
        run = self.run
        if run.is_attached and self.workspace.storage is not None:
            return self.workspace.storage, self.low
        segment = run.segment
        if segment is None or segment.length < self.high - run.start:
            raise RuntimeError(f"the tokens {self.low:,} to {self.high:,} of a row are not on the device")
        return segment.storage, segment.offset + self.low - run.start


@dataclass(slots=True)
class Node:
    """Neighbouring pieces that the same rows have, in one stretch of memory.

    Attributes:
        rows: Indices of those rows.
        pieces: The tokens, in order.
        storage: Where they are.
        slot: Slot of the first of them.
    """

    rows: tuple[int, ...]
    pieces: list[Piece]
    storage: Storage
    slot: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.pieces[-1].high - self.pieces[0].low

    def is_in_place(self) -> bool:
        """Say whether the tokens still are where they were."""
        first = self.pieces[0].low
        return all(
            piece.run.start <= piece.low
            and piece.run.stop >= piece.high
            and piece.memory() == (self.storage, self.slot + piece.low - first)
            for piece in self.pieces
        )


def order_of(places: Sequence[Place]) -> list[int]:
    """Return the indices of the places in an order in which those that share much are neighbours."""
    keys = [[id(piece.run) for piece in pieces_of(place)] for place in places]
    return sorted(range(len(places)), key=keys.__getitem__)


def pieces_of(place: Place) -> list[Piece]:
    """Return where a branch's tokens are, from the first on."""
    shared: list[Piece] = []
    skip = 0
    if place.alias is not None:
        workspace, cursor = place.alias
        skip = cursor.length
        shared = [Piece(workspace, run, run.start, stop) for run, stop in cursor.path()]
    own = [Piece(place.workspace, run, max(run.start, skip), stop) for run, stop in place.cursor.path() if stop > skip]
    return shared + own


def shared_nodes(paths: Sequence[Sequence[Piece]], limits: Sequence[int]) -> list[Node]:
    """Return what two or more rows have, each row's tokens up to its limit."""
    by_run: dict[int, list[tuple[int, Piece]]] = {}
    for index, (path, limit) in enumerate(zip(paths, limits, strict=True)):
        for piece in path:
            high = min(piece.high, limit)
            if high > piece.low:
                cut = Piece(piece.workspace, piece.run, piece.low, high)
                by_run.setdefault(id(piece.run), []).append((index, cut))
    nodes: list[Node] = []
    for found in by_run.values():
        for rows, piece in _steps(found):
            _add(nodes, rows, piece)
    return nodes


def _steps(found: Sequence[tuple[int, Piece]]) -> Iterable[tuple[tuple[int, ...], Piece]]:
    """Cut one run where rows come and go; give the parts that two or more rows have."""
    first = found[0][1]
    borders = sorted({border for _, piece in found for border in (piece.low, piece.high)})
    for low, high in itertools.pairwise(borders):
        rows = tuple(index for index, piece in found if piece.low <= low and piece.high >= high)
        if len(rows) > 1:
            yield rows, Piece(first.workspace, first.run, low, high)


def _add(nodes: list[Node], rows: tuple[int, ...], piece: Piece) -> None:
    """Add a shared piece, to the node before it where the same rows have both and they are neighbours in memory."""
    storage, slot = piece.memory()
    last = next((node for node in reversed(nodes) if node.rows == rows), None)
    is_next = last is not None and last.pieces[-1].high == piece.low
    if last is not None and is_next and last.storage is storage and last.slot + last.num_tokens == slot:
        last.pieces.append(piece)
    else:
        nodes.append(Node(rows, [piece], storage, slot))


def private_pieces(path: Sequence[Piece], index: int, nodes: Sequence[Node]) -> list[Piece]:
    """Return the parts of a row's path that no node has for it."""
    spans = sorted((node.pieces[0].low, node.pieces[-1].high) for node in nodes if index in node.rows)
    found: list[Piece] = []
    for piece in path:
        low = piece.low
        for start, stop in spans:
            if start < piece.high and stop > low:
                if start > low:
                    found.append(Piece(piece.workspace, piece.run, low, start))
                low = max(low, stop)
        if low < piece.high:
            found.append(Piece(piece.workspace, piece.run, low, piece.high))
    return found
