"""The key record of an encrypted store: made, opened, and changed for another key of the user's."""

from pathlib import Path

from agentmem._crypto import check_key, new_data_key, unwrap, wrap
from agentmem._format import StoreFormat
from agentmem._lmdb.cipher import KEY_KEY, Cipher
from agentmem._lmdb.tables import Table
from agentmem._lmdb.transaction import ReadTransaction, WriteTransaction
from agentmem.errors import CorruptionError, EncryptionError


def new_record(key: bytes, store_format: StoreFormat) -> bytes:
    """Return the key record of a new store that `key` opens.

    Raises:
        InvalidInputError: The key has not 32 bytes, or the package `cryptography` is not installed.
    """
    check_key(key)
    return wrap(key, new_data_key(), store_format.uuid)


def open_cipher(txn: ReadTransaction, store_format: StoreFormat, path: Path, key: bytes | None) -> Cipher | None:
    """Return what reads and writes an encrypted store; None for a plain one.

    Args:
        txn: A transaction that reads plain rows.
        store_format: What the store says of itself.
        path: The store's directory, for messages.
        key: The user's key, if one was given.

    Raises:
        EncryptionError: The store is encrypted and the key is missing or another one, or it is not encrypted.
        InvalidInputError: The key has not 32 bytes, or the package `cryptography` is not installed.
        CorruptionError: The key record is lost.
    """
    if not store_format.is_encrypted:
        if key is not None:
            raise EncryptionError(
                f"{str(path)!r} is not encrypted, but a key was given: open it without one, or export its sessions and "
                "import them into a new store that is made with the key"
            )
        return None
    if key is None:
        raise EncryptionError(
            f"{str(path)!r} is encrypted: give its key as Config(encryption_key=...), or --key-file on the command line"
        )
    return Cipher(_data_key(txn, store_format, path, key))


def rekey(txn: WriteTransaction, store_format: StoreFormat, path: Path, key: bytes, new_key: bytes) -> None:
    """Write the key record anew, so that `new_key` opens the store in the place of `key`.

    Raises:
        EncryptionError: `key` does not open the store.
        InvalidInputError: The new key has not 32 bytes.
    """
    check_key(new_key)
    data_key = _data_key(txn, store_format, path, key)
    txn.put(Table.META, KEY_KEY, wrap(new_key, data_key, store_format.uuid))


def _data_key(txn: ReadTransaction, store_format: StoreFormat, path: Path, key: bytes) -> bytes:
    check_key(key)
    record = txn.get(Table.META, KEY_KEY)
    if record is None:
        raise CorruptionError(f"{str(path)!r} is encrypted, but has lost its key record: restore it from a backup")
    return unwrap(key, record, store_format.uuid, repr(str(path)))
