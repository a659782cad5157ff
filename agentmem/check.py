"""Verify a store: every record, every reference, every count, and on request every block.

Changes nothing. Knows nothing of models.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from agentmem._lmdb import Environment, ReadTransaction, Table
from agentmem.errors import AgentMemError, CorruptionError, NotFoundError
from agentmem.ids import BlockDigest, SessionId, short
from agentmem.tiers.blockrows import BlockInfo, read_sum
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.sealing import verified
from agentmem.tree import nodes, pins, rows, tails
from agentmem.tree.checkpoint import Checkpoint

_ADVICE = {
    Table.SESSIONS: "the session cannot be opened: `agentmem repair` makes its record again from its checkpoints",
    Table.BRANCHES: "the branch cannot be opened: drop it, or let `agentmem repair` make it again from the reflog",
    Table.TAILS: "tokens after a branch's tip are lost: fork its tip, or let `agentmem repair` put it back there",
    Table.NODES: "its tokens are lost; branches behind it cannot be opened: restore a backup, or let `agentmem repair` "
    "put them back to what is before it",
    Table.NREFS: "gc leaves the checkpoint alone: `agentmem repair` counts it again",
    Table.TOMB: "gc looks at the checkpoint itself, nothing is lost: `agentmem repair` makes the row again",
    Table.REFLOG: "one line of the history is lost, nothing else: `agentmem repair` drops the row",
    Table.BINDEX: "the block counts as not stored: its KV is computed again from tokens, and stored again",
    Table.CHAIN: "the block is not found by its tokens any more; checkpoints still have it: storing it heals that",
}
"""What damage to a row of each table means."""

_UNCOUNTED = "gc could remove what is still named: let `agentmem repair` count again before gc runs"
_OVERCOUNTED = "space is kept for nothing, nothing is lost: `agentmem repair` counts again"
_UNLIKE = "one of its two copies is damaged; the other is used, and written over it when the store is open for writing"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        record: What it is wrong with.
        kind: "structure", "damaged", "copy", "dangling", "contradiction", "count" or "orphan".
        advice: What it means and what to do.
    """

    record: str
    kind: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What a check looked at, and what it found.

    Attributes:
        problems: What is wrong; empty for a sound store.
        num_sessions: Sessions.
        num_branches: Branches.
        num_checkpoints: Checkpoints.
        num_blocks: Blocks.
        num_blocks_read: Blocks that were decoded and verified.
        nbytes_read: Stored bytes of those.
    """

    problems: tuple[Problem, ...]
    num_sessions: int
    num_branches: int
    num_checkpoints: int
    num_blocks: int
    num_blocks_read: int
    nbytes_read: int

    @property
    def is_sound(self) -> bool:
        """Say whether nothing is wrong."""
        return not self.problems


def check(
    environment: Environment,
    disk: DiskTier,
    *,
    read_data: bool = False,
    fraction: float = 1.0,
    rng: random.Random | None = None,
) -> CheckReport:
    """Verify the structure of the file, each record's checksum, every reference and every count.

    Args:
        environment: The store.
        disk: Its blocks.
        read_data: Also decode blocks and compare them with their names.
        fraction: Part of the blocks to read, chosen anew each time; 1.0 for all.
        rng: Chooses them; None for a fresh one.
    """
    structure = environment.verify()
    with environment.read() as txn:
        survey = _Survey(txn)
        for text in structure:
            survey.found("the data file", "structure", f"{text}: run `agentmem repair`, which keeps the old file")
        survey.look(disk)
        for table, key in sorted(txn.unlike):
            survey.found(f"row {key.hex()} of {table.value}", "copy", _UNLIKE)
    chosen = [digest for digest in survey.blocks if (rng or random.Random()).random() < fraction] if read_data else []
    nbytes_read = sum(_read_block(disk, digest, survey.found) for digest in chosen)
    return CheckReport(
        problems=tuple(survey.problems),
        num_sessions=survey.num_sessions,
        num_branches=survey.num_branches,
        num_checkpoints=len(survey.checkpoints),
        num_blocks=len(survey.blocks),
        num_blocks_read=len(chosen),
        nbytes_read=nbytes_read,
    )


class _Survey:
    """One look at all records, at one moment, and what was found wrong."""

    def __init__(self, txn: ReadTransaction) -> None:
        self.problems: list[Problem] = []
        self.blocks: dict[BlockDigest, BlockInfo] = {}
        self.checkpoints: dict[bytes, Checkpoint] = {}
        self.num_sessions = 0
        self.num_branches = 0
        self._txn = txn
        self._names: Counter[bytes] = Counter()
        self._block_names: Counter[BlockDigest] = Counter()
        # Whatever a lost record named is counted, but nobody can say so any more.
        self._is_all_read = True

    def found(self, record: str, kind: str, advice: str) -> None:
        """Note a problem."""
        self.problems.append(Problem(record, kind, advice))

    def look(self, disk: DiskTier) -> None:
        """Look at everything but the blocks' bytes."""
        self._look_at_blocks(disk)
        self._look_at_checkpoints()
        self._look_at_sessions()
        self._look_at_branches()
        self._names.update(pins.each(self._txn))
        self._look_at_counts()
        for table in (Table.META, Table.TAILS, Table.LEASES):
            list(self._rows(table, lambda _, value: value))
        list(self._rows(Table.REFLOG, rows.unpack_move))

    def _rows(
        self, table: Table, unpack: Callable[[bytes, bytes], T], prefix: bytes = b""
    ) -> Iterator[tuple[bytes, T]]:
        """Yield the sound rows of a table; note the others."""
        for key, value in self._txn.scan_each(table, prefix):
            try:
                if isinstance(value, CorruptionError):
                    raise value
                unpacked = unpack(key, value)
            except CorruptionError as error:
                self._lost(table, key, error)
                continue
            yield key, unpacked

    def _lost(self, table: Table, key: bytes, error: CorruptionError) -> None:
        self._is_all_read = False
        self.found(
            f"row {key.hex()} of {table.value}", "damaged", f"{error}; {_ADVICE.get(table, 'run `agentmem repair`')}"
        )

    def _look_at_blocks(self, disk: DiskTier) -> None:
        for digest, info in disk.iter_index(self._txn):
            if isinstance(info, CorruptionError):
                self._lost(Table.BINDEX, digest, info)
            else:
                self.blocks[digest] = info
        for _, digest in self._rows(Table.CHAIN, lambda _, value: BlockDigest(value)):
            if digest not in self.blocks:
                self.found(
                    f"block {digest.hex()}", "dangling", "it is named for reuse but not stored; storing heals it"
                )

    def _look_at_checkpoints(self) -> None:
        for node, checkpoint in nodes.each(self._txn):
            if isinstance(checkpoint, CorruptionError):
                self._lost(Table.NODES, node, checkpoint)
                continue
            self.checkpoints[node] = checkpoint
            self._block_names.update(checkpoint.digests())
            missing = [digest for digest in checkpoint.digests() if digest not in self.blocks]
            if missing:
                text = f"{len(missing)} of its blocks are not stored, first {missing[0].hex()}"
                self.found(_named(node), "dangling", f"{text}: {_meaning_of_missing(checkpoint, missing)}")
        for node, checkpoint in self.checkpoints.items():
            self._look_at_parent(node, checkpoint)

    def _look_at_parent(self, node: bytes, checkpoint: Checkpoint) -> None:
        num_before = 0
        if checkpoint.parent_id is not None:
            key = rows.node_key(checkpoint.session_id, checkpoint.parent_id)
            self._names[key] += 1
            parent = self.checkpoints.get(key)
            if parent is None:
                text = f"its parent {checkpoint.parent_id.hex()} is not stored"
                self.found(_named(node), "dangling", f"{text}; {_ADVICE[Table.NODES]}")
                return
            num_before = parent.num_tokens
        if num_before + checkpoint.num_own_tokens != checkpoint.num_tokens:
            text = f"{num_before} tokens before it and {checkpoint.num_own_tokens} own are not {checkpoint.num_tokens}"
            self.found(_named(node), "contradiction", f"{text}; {_ADVICE[Table.NODES]}")

    def _look_at_sessions(self) -> None:
        by_name = dict(self._rows(Table.SESSIONS, lambda _, value: value, rows.SESSION_NAME_PREFIX))
        for _, session in self._rows(Table.SESSIONS, rows.unpack_session, rows.SESSION_PREFIX):
            self.num_sessions += 1
            if by_name.pop(rows.session_name_key(session.name), None) != session.session_id:
                self.found(f"session {session.name!r}", "dangling", "its name does not lead to it: rename it")
            if self._txn.get_view(Table.BRANCHES, rows.branch_key(session.session_id, session.active_branch)) is None:
                text = f"its active branch {session.active_branch!r} is not stored: switch to another"
                self.found(f"session {session.name!r}", "dangling", text)
        for key, session_id in by_name.items():
            if self._txn.get_view(Table.SESSIONS, rows.session_key(SessionId(session_id))) is None:
                name = key[len(rows.SESSION_NAME_PREFIX) :].decode(errors="replace")
                self.found(f"session {name!r}", "dangling", "the name leads to no session: remove it")

    def _look_at_branches(self) -> None:
        for key, stored in self._rows(Table.BRANCHES, rows.unpack_branch):
            self.num_branches += 1
            name = f"branch {stored.record.name!r} of session {key[: rows.SESSION_ID_NBYTES].hex()}"
            if self._txn.get_view(Table.SESSIONS, rows.session_key(SessionId(key[: rows.SESSION_ID_NBYTES]))) is None:
                self.found(name, "orphan", "its session is not stored: `agentmem repair` makes its record again")
            if stored.record.tip is not None:
                tip = key[: rows.SESSION_ID_NBYTES] + stored.record.tip
                self._names[tip] += 1
                self._look_at_tip(name, stored, self.checkpoints.get(tip))
            try:
                tails.read(self._txn, key, stored)
            except CorruptionError as error:
                self.found(name, "damaged", f"{error}; {_ADVICE[Table.TAILS]}")
        for key in tails.orphans(self._txn):
            self.found(f"row {key.hex()} of tails", "orphan", "it belongs to no branch: gc removes it")

    def _look_at_tip(self, name: str, stored: rows.StoredBranch, tip: Checkpoint | None) -> None:
        if tip is None:
            self.found(name, "dangling", "its tip is not stored: drop it, or let `agentmem repair` put it back")
        elif tip.num_tokens != stored.start:
            text = f"its open tokens start at {stored.start}, its tip ends at {tip.num_tokens}"
            self.found(name, "contradiction", f"{text}: `agentmem repair` puts it back to its tip")

    def _look_at_counts(self) -> None:
        counted = dict(self._rows(Table.NREFS, rows.unpack_refs))
        tombs = {key for key, _ in self._rows(Table.TOMB, lambda _, value: value)}
        for node in self.checkpoints.keys() | counted.keys():
            counts = counted.get(node)
            if counts is None or node not in self.checkpoints:
                what = "is counted but not stored" if counts else "is stored but not counted"
                self.found(_named(node), "count", f"it {what}; {_ADVICE[Table.NREFS]}")
                continue
            self._compare(_named(node), counts.refs, self._names[node])
            if (rows.tomb_key(counts.dropped_ns, node) in tombs) != (counts.refs == 0):
                self.found(_named(node), "count", "its row for gc does not fit its count: `agentmem repair` mends it")
        for digest, info in self.blocks.items():
            if info.is_counted:
                self._compare(f"block {digest.hex()}", info.refs, self._block_names[digest])
        num_blocks = read_sum(self._txn).totals.num_blocks
        if self._is_all_read and num_blocks != len(self.blocks):
            text = f"it says that there are {num_blocks}, there are {len(self.blocks)}: `agentmem repair` counts again"
            self.found("the sum of blocks", "count", text)

    def _compare(self, record: str, counted: int, named: int) -> None:
        if counted < named:
            self.found(record, "count", f"named {named} times, counted {counted}: {_UNCOUNTED}")
        elif counted > named and self._is_all_read:
            self.found(record, "count", f"named {named} times, counted {counted}: {_OVERCOUNTED}")


def _read_block(disk: DiskTier, digest: BlockDigest, found: Callable[[str, str, str], None]) -> int:
    """Decode and verify one block; return its stored bytes."""
    try:
        data = disk.load_record(digest)
        verified(data)
    except NotFoundError:
        return 0  # gc removed it since the survey
    except AgentMemError as error:
        found(f"block {digest.hex()}", "damaged", f"{error}; its KV is computed again from tokens")
        return 0
    return len(data)


def _meaning_of_missing(checkpoint: Checkpoint, missing: list[BlockDigest]) -> str:
    """Say what it means that records of a checkpoint are not stored."""
    if any(mark.payload in missing for mark in checkpoint.marks):
        return (
            "a model input (image, audio, text) is lost: where KV is lost too it cannot be computed; restore a backup"
        )
    return "their KV is computed again from tokens, and stored again"


def _named(node: bytes) -> str:
    session_id, checkpoint_id = node[: rows.SESSION_ID_NBYTES], node[rows.SESSION_ID_NBYTES :]
    return f"checkpoint {short(checkpoint_id)} of session {session_id.hex()}"
