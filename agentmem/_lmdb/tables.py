"""The tables of a store, and which part of their keys tells what is in the store.

What the rows hold is described where the rows are packed.
"""

from enum import StrEnum


class Table(StrEnum):
    """The tables of a store."""

    META = "meta"
    CHAIN = "chain"
    BINDEX = "bindex"
    BLOCKS = "blocks"
    NODES = "nodes"
    NREFS = "nrefs"
    SESSIONS = "sessions"
    BRANCHES = "branches"
    TAILS = "tails"
    REFLOG = "reflog"
    TOMB = "tomb"
    LEASES = "leases"
    MIRROR = "mirror"


def telling_start(table: Table, key: bytes) -> int | None:
    """Return where the part of a key begins that tells a name, or lets one try whether tokens are stored.

    What is before it are ids, which are random. Keys of the other tables, for which this is None, are random ids,
    numbers and times as a whole.
    """
    match table:
        case Table.CHAIN | Table.BINDEX:
            return 0  # hashes of tokens
        case Table.SESSIONS if key[:1] == b"n":
            return 1  # a session's name
        case Table.BRANCHES | Table.TAILS:
            return 8  # a branch's name, behind the session's id
        case _:
            return None


def telling_stop(table: Table, key: bytes) -> int:
    """Return where that part ends: in `tails` a NUL ends the name, and the row's number follows."""
    return key.find(b"\0", 8) + 1 or len(key) if table is Table.TAILS else len(key)
