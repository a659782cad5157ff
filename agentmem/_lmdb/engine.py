"""What is peculiar to LMDB: how it is opened, what its errors mean, and the structure of its file."""

import errno
import os
from pathlib import Path

import lmdb
import lmdb.verify

from agentmem import _directory
from agentmem._format import FORMAT_KEY, StoreFormat
from agentmem._lmdb.transaction import Handles, ReadTransaction, Table, WriteTransaction
from agentmem.errors import (
    AgentMemError,
    CapacityError,
    CorruptionError,
    InvalidInputError,
    ReadOnlyError,
    StorageFullError,
    StoreLockedError,
)

_MAX_MAP_NBYTES = 1 << 40
_MIN_MAP_NBYTES = 1 << 28
_MAX_VERIFY_NBYTES = 64 << 20  # about 15 ms
_NUM_VERIFY_TRIES = 3

# The first line whose classes or codes match an error gives its meaning. Disk full has no line: LMDB says EIO.
_MEANINGS: list[tuple[tuple[type[lmdb.Error], ...], set[int], type[AgentMemError], str]] = [
    (
        (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PanicError),
        set(),
        CorruptionError,
        "it is damaged: run `agentmem check`",
    ),
    ((lmdb.NotFoundError,), set(), CorruptionError, "a table is missing: run `agentmem check`"),
    ((lmdb.MapFullError, lmdb.MapResizedError), set(), StorageFullError, "the map of the file is full: remove data"),
    ((lmdb.BadValsizeError,), set(), InvalidInputError, "a key must have 1 to 511 bytes"),
    ((lmdb.ReadersFullError,), set(), CapacityError, "too many processes and threads read it at once"),
    ((lmdb.TxnFullError,), set(), CapacityError, "the operation is too large: split it"),
    ((lmdb.MemoryError,), {errno.ENOMEM}, CapacityError, "there is too little memory or address space"),
    ((), {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, StorageFullError, "the file system is full"),
    ((), {errno.EACCES, errno.EPERM, errno.EROFS}, ReadOnlyError, "this user may not write there"),
    ((), {errno.ENODEV, errno.ENOLCK, errno.EINVAL}, InvalidInputError, "its file system cannot map or lock files"),
]


def translate(error: lmdb.Error, path: Path) -> AgentMemError:
    """Return our error for LMDB's, about the store at `path`."""
    if "already open in this process" in str(error):
        return StoreLockedError(
            f"{str(path)!r} is already open in this process (or was, when it forked): use that handle, or close it"
        )
    for classes, codes, meaning, advice in _MEANINGS:
        if isinstance(error, classes) or getattr(error, "code", None) in codes:
            return meaning(f"LMDB cannot use {str(path)!r}: {advice} ({error})")
    return CorruptionError(f"LMDB cannot use {str(path)!r}: its device or file fails ({error}); look at the system log")


def is_damage(error: lmdb.Error) -> bool:
    """Tell whether the error means that the file's structure is broken."""
    return isinstance(error, _MEANINGS[0][0])


def open_lmdb(path: Path, *, read_only: bool) -> lmdb.Environment:
    """Open the environment with the largest map that this process gets, 1 TiB if it can.

    Never sync=False, writemap, map_async or readahead=False: they corrupt on power loss, or read 5-15 times slower
    (docs/decisions, measured). max_spare_txns=0 because of fork; metasync=False because `Environment` syncs itself.
    """
    map_nbytes = _MAX_MAP_NBYTES
    can_lock = True
    while True:
        try:
            return lmdb.open(
                str(path),
                map_size=map_nbytes,
                max_dbs=16,
                max_readers=512,
                mode=0o600,
                metasync=False,
                max_spare_txns=0,
                readonly=read_only,
                create=not read_only,
                lock=can_lock,
            )
        except lmdb.Error as error:
            if isinstance(error, lmdb.MemoryError) and map_nbytes > _MIN_MAP_NBYTES:
                map_nbytes //= 2
            elif read_only and can_lock and error.code in {errno.EACCES, errno.EPERM, errno.EROFS}:
                can_lock = False  # where nobody can write, readers need no lock
            else:
                raise


def initialise(env: lmdb.Environment, path: Path) -> None:
    """Make the tables and the format record of a new store, all on disk when this returns."""
    with env.begin(write=True, buffers=True) as txn:
        handles = {table: env.open_db(table.value.encode(), txn=txn) for table in Table}
        WriteTransaction(txn, handles).put(Table.META, FORMAT_KEY, StoreFormat.new().pack())
    env.sync(True)
    _directory.sync(path)


def is_new(env: lmdb.Environment) -> bool:
    """Tell whether nothing was ever written: the store is being made, or a crash cut its making short."""
    return env.stat()["entries"] == 0


def open_tables(env: lmdb.Environment, path: Path) -> tuple[Handles, StoreFormat]:
    """Open every table, after checking that the format is one that this code reads.

    Raises:
        InvalidInputError: The data file is another program's.
        FormatVersionError: It needs newer code.
        CorruptionError: The format record is damaged.
    """
    try:
        handles = {Table.META: env.open_db(Table.META.value.encode(), create=False)}
    except lmdb.NotFoundError as error:
        raise InvalidInputError(f"{str(path)!r} is no agentmem store: its LMDB file has other tables") from error
    with env.begin(buffers=True) as txn:
        record = ReadTransaction(txn, handles).get(Table.META, FORMAT_KEY)
    if record is None:
        raise InvalidInputError(f"{str(path)!r} is no agentmem store: its LMDB file has no format record")
    store_format = StoreFormat.unpack(record, repr(str(path)))
    return {table: env.open_db(table.value.encode(), create=False) for table in Table}, store_format


def require_sound(data_file: Path, *, read_only: bool) -> None:
    """Refuse a data file that was cut off, and a small one whose structure is damaged: LMDB would die of SIGBUS.

    A damaged page may give a value a length that reaches beyond the file's end; in a large file that is unlikely, and
    the walk would take too long. A file may be short without harm: pages that were taken at its end and freed in the
    same transaction are never written. Then it is made as long as LMDB believes it to be.

    Raises:
        CorruptionError: Pages that are in use are missing or damaged.
    """
    missing_nbytes = _directory.missing_nbytes(data_file)
    if not missing_nbytes and not 0 < _directory.nbytes(data_file) <= _MAX_VERIFY_NBYTES:
        return
    problems = _verify_at_rest(data_file)
    if problems:
        cut = f", {missing_nbytes} bytes are missing at its end" if missing_nbytes else ""
        raise CorruptionError(f"{str(data_file)!r} is damaged{cut}: {problems[0]}; restore it from a backup")
    if missing_nbytes and not read_only:
        os.truncate(data_file, _directory.nbytes(data_file) + missing_nbytes)


def _verify_at_rest(data_file: Path) -> list[str]:
    """Verify a file that another process may be writing: what a commit changed meanwhile is no damage."""
    for _ in range(_NUM_VERIFY_TRIES):
        transaction = _directory.last_transaction(data_file)
        problems = verify(data_file)
        if not problems or transaction == _directory.last_transaction(data_file):
            return problems
    return []


def verify(data_file: Path) -> list[str]:
    """Return what is wrong with the structure of a data file, without handing it to LMDB."""
    try:
        return list(lmdb.verify.verify(str(data_file)))  # type: ignore[no-untyped-call] # py-lmdb types no verify
    except lmdb.verify.VerifyError as error:
        return [str(error)]
