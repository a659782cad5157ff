"""The tree of a session as text, for people.

Knows nothing of tiers or scores: whatever stands beside a branch is text that the caller gives.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentmem.ids import CheckpointId, short
from agentmem.marks import MarkKind, Marks
from agentmem.tree.checkpoint import BranchRecord, Checkpoint
from agentmem.tree.tree import SessionTree

_MAX_MESSAGE = 40
_MAX_FORK_DEPTH = 16
"""Forks inside forks that are indented; below, the last child goes on in its parent's column."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One line before its columns are aligned."""

    left: str
    own: str
    total: str
    note: str


def render(
    tree: SessionTree,
    *,
    title: str,
    branches: Iterable[BranchRecord],
    active: str | None = None,
    notes: Mapping[str, str] | None = None,
    fold: bool = True,
) -> str:
    """Draw the session: one line a checkpoint, forks as ├─ and └─.

    A checkpoint's parent is the nearest ● above it in its own column, or the one that its ├─ or └─ hangs from, so a
    line of checkpoints keeps its column however long it is. `own` counts the tokens since the checkpoint drawn before,
    `total` all tokens from the root. ○ marks checkpoints that no branch reaches any more. What has
    KV that an edit moved from elsewhere is called approximate.

    Args:
        tree: The checkpoints.
        title: First words of the first line: the session's name.
        branches: The branches; open tokens are shown as `+n`.
        active: Name of the active branch, marked with *.
        notes: Text to show beside a branch, by its name: tier, score.
        fold: Leave out checkpoints that `fork`, `drop` or `close` made where nothing happens: one child and no branch,
            or the end of a dropped branch.
    """
    records = sorted(branches, key=lambda branch: branch.created_s)
    drawing = _Drawing(tree, records, active, notes or {}, fold=fold)
    num_tokens = sum(c.num_own_tokens for c in tree) + sum(branch.num_open for branch in records)
    head = f"{_printable(title)}  {_counted(len(tree), 'checkpoint')} · {_counted(len(records), 'branch')} · "
    return "\n".join([head + _counted(num_tokens, "token"), *_aligned([*drawing.lines(), *drawing.rootless()])])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint is drawn.

    Attributes:
        checkpoint: What is drawn.
        num_before: Tokens from the root up to the checkpoint drawn before it.
        lead: What stands before its mark.
        below: What stands before the marks below it.
        depth: Forks around it.
    """

    checkpoint: Checkpoint
    num_before: int
    lead: str
    below: str
    depth: int


class _Drawing:
    """What one call of `render` looks up again and again."""

    def __init__(
        self,
        tree: SessionTree,
        branches: Sequence[BranchRecord],
        active: str | None,
        notes: Mapping[str, str],
        *,
        fold: bool,
    ) -> None:
        self.tree = tree
        self.active = active
        self.notes = notes
        self.fold = fold
        self.without_tip = [branch for branch in branches if branch.tip is None or branch.tip not in tree]
        self.at_tip: dict[CheckpointId, list[BranchRecord]] = {}
        for branch in branches:
            if branch.tip is not None and branch.tip in tree:
                self.at_tip.setdefault(branch.tip, []).append(branch)
        self.reached = self._reached()
        self.approximate = self._approximate()
        self.hidden = self._left_over() if fold else set()
        self.sizes = tree.subtree_sizes()

    def lines(self) -> Iterator[_Line]:
        """Yield a line for every checkpoint that is shown, parents first."""
        todo = self._places(self._shown(self.tree.roots()), 0, "", 0)[::-1]
        while todo:
            place = todo.pop()
            children = self._shown(self.tree.children(place.checkpoint.checkpoint_id))
            if self._is_folded(place.checkpoint, children):
                todo.append(replace(place, checkpoint=children[0]))
                continue
            yield self._line(place)
            todo += self._places(children, place.checkpoint.num_tokens, place.below, place.depth)[::-1]

    def _places(self, children: list[Checkpoint], num_before: int, below: str, depth: int) -> list[_Place]:
        """Return where the children of one checkpoint are drawn, from top to bottom."""
        if len(children) == 1:
            return [_Place(children[0], num_before, below, below, depth)]
        goes_on = depth >= _MAX_FORK_DEPTH
        if goes_on:
            children = sorted(children, key=lambda child: self.sizes[child.checkpoint_id])
        places = [_Place(child, num_before, below + "├─", below + "│ ", depth + 1) for child in children[:-1]]
        for child in children[-1:]:
            lead, under = (below, below) if goes_on else (below + "└─", below + "  ")
            places.append(_Place(child, num_before, lead, under, depth if goes_on else depth + 1))
        return places

    def rootless(self) -> Iterator[_Line]:
        """Yield a line for every branch without a checkpoint."""
        for branch in self.without_tip:
            yield _Line(f"◌ {self._names([branch])}", "", "", self._notes([branch]))

    def _line(self, place: _Place) -> _Line:
        checkpoint = place.checkpoint
        branches = self.at_tip.get(checkpoint.checkpoint_id, [])
        mark = "●" if checkpoint.checkpoint_id in self.reached else "○"
        parts = [f"{place.lead}{mark} {short(checkpoint.checkpoint_id)}", self._names(branches)]
        left = " ".join(part for part in parts if part)
        message = _printable(checkpoint.message)
        return _Line(
            left=f"{left}  {message}" if message else left,
            own=f"{checkpoint.num_tokens - place.num_before:,} own",
            total=f"{checkpoint.num_tokens:,} total",
            note=self._notes(branches) if branches else self._fidelity(checkpoint.checkpoint_id),
        )

    def _names(self, branches: Sequence[BranchRecord]) -> str:
        """Return `[patch-a] [patch-b* +12]`."""
        names = []
        for branch in branches:
            star = "*" if branch.name == self.active else ""
            names.append(f"[{branch.name}{star}{f' +{branch.num_open:,}' if branch.num_open else ''}]")
        return " ".join(names)

    def _notes(self, branches: Sequence[BranchRecord]) -> str:
        notes = (
            "  ".join(filter(None, (self.notes.get(branch.name), self._fidelity(branch.tip, branch.marks))))
            for branch in branches
        )
        return " | ".join(filter(None, notes))

    def _fidelity(self, tip: CheckpointId | None, marks: Marks = ()) -> str:
        """Return "approximate" for what has moved KV among its own tokens or up to the checkpoint `tip`."""
        return "approximate" if tip in self.approximate or _has_splice(marks) else ""

    def _approximate(self) -> set[CheckpointId]:
        """Return the checkpoints that have moved KV, their own or an ancestor's."""
        found: set[CheckpointId] = set()
        todo = [checkpoint for checkpoint in self.tree if _has_splice(checkpoint.marks)]
        while todo:
            name = todo.pop().checkpoint_id
            if name not in found:
                found.add(name)
                todo += self.tree.children(name)
        return found

    def _is_folded(self, checkpoint: Checkpoint, children: Sequence[Checkpoint]) -> bool:
        named = checkpoint.checkpoint_id in self.at_tip
        return self.fold and checkpoint.is_auto and len(children) == 1 and not named

    def _shown(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        return [checkpoint for checkpoint in checkpoints if checkpoint.checkpoint_id not in self.hidden]

    def _left_over(self) -> set[CheckpointId]:
        """Return the automatic checkpoints that no branch reaches and that lead nowhere: ends of dropped branches."""
        found: set[CheckpointId] = set()
        for checkpoint in sorted(self.tree, key=lambda checkpoint: checkpoint.created_s, reverse=True):
            name = checkpoint.checkpoint_id
            is_end = all(child.checkpoint_id in found for child in self.tree.children(name))
            if checkpoint.is_auto and name not in self.reached and is_end:
                found.add(name)
        return found

    def _reached(self) -> set[CheckpointId]:
        """Return the checkpoints that are a branch's tip or an ancestor of one."""
        reached: set[CheckpointId] = set()
        for tip in self.at_tip:
            for checkpoint in self.tree.lineage(tip):
                if checkpoint.checkpoint_id in reached:
                    break
                reached.add(checkpoint.checkpoint_id)
        return reached


def _has_splice(marks: Marks) -> bool:
    return any(mark.kind is MarkKind.SPLICE for mark in marks)


def _aligned(lines: Sequence[_Line]) -> list[str]:
    """Return the lines with their columns under one another."""
    left = max((_width(line.left) for line in lines), default=0)
    own = max((len(line.own) for line in lines), default=0)
    total = max((len(line.total) for line in lines), default=0)
    return [
        f"{line.left}{' ' * (left - _width(line.left))}  {line.own:>{own}}  {line.total:>{total}}  {line.note}".rstrip()
        for line in lines
    ]


def _printable(text: str) -> str:
    """Return user text on one line, without control characters, cut to `_MAX_MESSAGE`."""
    plain = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    return plain if len(plain) <= _MAX_MESSAGE else plain[: _MAX_MESSAGE - 1] + "…"


def _width(text: str) -> int:
    """Count the columns that a terminal gives to `text`."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _counted(number: int, noun: str) -> str:
    """Return "1 branch", "2 branches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
