"""Damage to a store's rows, as a failing disk would do it: for tests of what becomes of that."""

from agentmem._lmdb import Table, WriteTransaction
from agentmem._lmdb.row import TAGS
from agentmem.errors import NotFoundError


def overwrite(txn: WriteTransaction, table: Table, key: bytes, stored: bytes | bytearray) -> None:
    """Put bytes in the place of a row, checksum and all, and in the place of its copy where it has one."""
    txn.put_raw(table, [(key, stored)])
    if table in TAGS:
        overwrite_copy(txn, table, key, stored)


def overwrite_copy(txn: WriteTransaction, table: Table, key: bytes, stored: bytes | bytearray) -> None:
    """Put bytes in the place of a row's copy alone."""
    txn.put_raw(Table.MIRROR, [(TAGS[table] + key, stored)])


def flip(txn: WriteTransaction, table: Table, key: bytes, position: int = 16) -> None:
    """Change one bit of a row, and of its copy where it has one.

    Raises:
        NotFoundError: There is no such row.
    """
    view = txn.get_view(table, key)
    if view is None:
        raise NotFoundError(f"table {table.value!r} has no row {key.hex()}")
    stored = bytearray(view)
    stored[position] ^= 1
    overwrite(txn, table, key, stored)
