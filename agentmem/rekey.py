"""Give an encrypted store another key of the user's."""

from pathlib import Path

from agentmem import _lmdb
from agentmem._lmdb import Environment, Level
from agentmem.gc import CompactReport, compact


def rekey(path: Path, key: bytes, new_key: bytes) -> CompactReport:
    """Let `new_key` open the store in the place of `key`, and write its data file anew, so that no trace of it is left.

    The store's own key, which the user's wraps, stays: nothing is encrypted anew. Whoever had both the old key and the
    old file can read what is in the store later too; against them, import the sessions into a new store.

    Args:
        path: The store's directory. Nobody may have it open.
        key: The key that opens it now.
        new_key: The key that shall open it from now on.

    Raises:
        EncryptionError: `key` does not open the store, or it is not encrypted.
        InvalidInputError: A key has not 32 bytes.
        StoreLockedError: Somebody has the store open.
        StorageFullError: There is no room for the new data file; the new key counts, `compact` removes the old record.
    """
    with Environment.open(path, exclusive=True, key=key) as environment:
        environment.submit(
            lambda txn: _lmdb.rekey(txn, environment.format, path, key, new_key), level=Level.DURABLE
        ).result()
    return compact(path, key=new_key)
