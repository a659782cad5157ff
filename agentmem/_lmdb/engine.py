"""What is peculiar to LMDB: how it is opened, what its errors mean, and the structure of its file."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import lmdb.verify

from agentmem import _directory
from agentmem._format import FORMAT_KEY, StoreFormat, is_format_record
from agentmem._lmdb import pages
from agentmem._lmdb.cipher import KEY_KEY
from agentmem._lmdb.keys import new_record
from agentmem._lmdb.tables import Table
from agentmem._lmdb.transaction import Handles, ReadTransaction, WriteTransaction
from agentmem.errors import (
    AgentMemError,
    CapacityError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StorageFullError,
    StoreLockedError,
)

_MAX_MAP_NBYTES = 1 << 40
_MIN_MAP_NBYTES = 1 << 28
_MAX_VERIFY_NBYTES = 64 << 20
"""Up to this size a file's whole structure is verified at every opening: 140 ms per GB; `pages.unsafe` takes 6."""

_NUM_VERIFY_TRIES = 3

# The first line whose classes or codes match an error gives its meaning. Disk full has no line: LMDB says EIO.
_MEANINGS: list[tuple[tuple[type[lmdb.Error], ...], set[int], type[AgentMemError], str]] = [
    (
        (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError),
        set(),
        CorruptionError,
        "it is damaged: run `agentmem check`, which says what to do",
    ),
    ((lmdb.PanicError,), set(), ReadOnlyError, "a write of its first page failed: close it and open it again"),
    ((lmdb.NotFoundError,), set(), CorruptionError, "a table is missing: run `agentmem repair`"),
    ((lmdb.MapFullError, lmdb.MapResizedError), set(), StorageFullError, "the map of the file is full: remove data"),
    ((lmdb.BadValsizeError,), set(), InvalidInputError, "a key must have 1 to 511 bytes"),
    ((lmdb.ReadersFullError,), set(), CapacityError, "too many processes and threads read it at once"),
    ((lmdb.TxnFullError,), set(), CapacityError, "the operation is too large: split it"),
    ((lmdb.MemoryError,), {errno.ENOMEM}, CapacityError, "there is too little memory or address space"),
    ((), {errno.EMFILE, errno.ENFILE}, CapacityError, "there are too many open files"),
    ((), {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, StorageFullError, "the file system is full"),
    ((), {errno.EACCES, errno.EPERM, errno.EROFS}, ReadOnlyError, "this user may not write there"),
    ((), {errno.ENODEV, errno.ENOLCK, errno.EINVAL}, InvalidInputError, "its file system cannot map or lock files"),
]


def translate(error: lmdb.Error, path: Path) -> AgentMemError:
    """Return our error for LMDB's, about the store at `path`."""
    if "already open in this process" in str(error):
        return StoreLockedError(
            f"{str(path)!r} is already open in this process, {os.getpid()} (or was, when it forked): use that handle, "
            f"or close it"
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


def initialise(env: lmdb.Environment, path: Path, key: bytes | None) -> None:
    """Make the tables and the format record of a new store, encrypted with a `key`, all on disk when this returns.

    Nothing is changed when another process was first.

    Raises:
        InvalidInputError: The key has not 32 bytes, or the package `cryptography` is not installed.
    """
    store_format = StoreFormat.new(is_encrypted=key is not None)
    record = None if key is None else new_record(key, store_format)
    with env.begin(write=True, buffers=True) as txn:
        if txn.stat()["entries"]:
            return
        handles = {table: env.open_db(table.value.encode(), txn=txn) for table in Table}
        transaction = WriteTransaction(txn, handles, None)
        transaction.put(Table.META, FORMAT_KEY, store_format.pack())
        if record is not None:
            transaction.put(Table.META, KEY_KEY, record)
    env.sync(True)
    _directory.sync(path)


def grow_map(env: lmdb.Environment, path: Path) -> None:
    """Make the map larger than the data file has become, for a process whose address space allowed a small one only.

    Nobody may read or write meanwhile.

    Raises:
        lmdb.Error: There is no room for a larger map.
    """
    env.set_mapsize(max(2 * _directory.nbytes(path / _directory.DATA_FILE), env.info()["map_size"]))


def make_if_new(env: lmdb.Environment, path: Path, key: bytes | None, *, can_create: bool) -> None:
    """Make the store when nothing was ever written: it is being made, or a crash cut its making short.

    Raises:
        NotFoundError: It may not be made here.
        CorruptionError: It was finished before, and has lost everything.
    """
    if env.stat()["entries"]:
        return
    _directory.check_never_made(path)
    if not can_create:
        raise NotFoundError(f"the store at {str(path)!r} was never finished; open it with create")
    initialise(env, path, key)


def open_tables(env: lmdb.Environment, path: Path) -> tuple[Handles, StoreFormat]:
    """Open every table, after checking that the format is one that this code reads.

    Raises:
        InvalidInputError: The data file is another program's.
        FormatVersionError: It needs newer code.
        CorruptionError: The format record is damaged.
    """
    try:
        handles = {Table.META: env.open_db(Table.META.value.encode(), create=False)}
        _refuse_older(env, handles[Table.META], path)
        handles[Table.MIRROR] = env.open_db(Table.MIRROR.value.encode(), create=False)
    except lmdb.NotFoundError as error:
        raise InvalidInputError(f"{str(path)!r} is no agentmem store: its LMDB file has other tables") from error
    with env.begin(buffers=True) as txn:
        record = ReadTransaction(txn, handles, None).get(Table.META, FORMAT_KEY)
    if record is None:
        raise InvalidInputError(f"{str(path)!r} is no agentmem store: its LMDB file has no format record")
    store_format = StoreFormat.unpack(record, repr(str(path)))
    return {table: env.open_db(table.value.encode(), create=False) for table in Table}, store_format


def _refuse_older(env: lmdb.Environment, meta: lmdb._Database, path: Path) -> None:
    """Refuse a store of format 1 or 2 by name: its rows have no stamps, so nothing of it can be read as rows are now.

    Raises:
        FormatVersionError: It is one.
    """
    with env.begin() as txn:
        record = (txn.get(FORMAT_KEY, db=meta) or b"")[8:]  # behind the sum of a row of that time
    if is_format_record(record):
        StoreFormat.unpack(record, repr(str(path)))


def require_sound(data_file: Path, *, read_only: bool) -> None:
    """Refuse a data file that LMDB could not read, or would die of: a SIGBUS outside of the file.

    A large file is only looked at as far as that needs (pages.py). A file may be short without harm: pages that were
    taken at its end and freed in the same transaction are never written. Then it is made as long as LMDB believes it
    to be.

    Raises:
        CorruptionError: Pages that are in use are missing or damaged.
    """
    missing_nbytes = _directory.missing_nbytes(data_file)
    nbytes = _directory.nbytes(data_file)
    if not nbytes:
        return
    problems = _look_at_rest(data_file, verify if nbytes <= _MAX_VERIFY_NBYTES else pages.unsafe)
    if problems:
        cut = f", {missing_nbytes} bytes are missing at its end" if missing_nbytes else ""
        raise CorruptionError(f"{str(data_file)!r} is damaged{cut}: {problems[0]}; run `agentmem repair`")
    if missing_nbytes and not read_only:
        _directory.grow(data_file, missing_nbytes)


def _look_at_rest(data_file: Path, look: Callable[[Path], list[str]]) -> list[str]:
    """Look at a file that another process may be writing: what a commit changed meanwhile is no damage."""
    for _ in range(_NUM_VERIFY_TRIES):
        transaction = _directory.last_transaction(data_file)
        problems = look(data_file)
        if not problems or transaction == _directory.last_transaction(data_file):
            return problems
    return []


def verify(data_file: Path) -> list[str]:
    """Return what is wrong with the structure of a data file, without handing it to LMDB."""
    try:
        return list(lmdb.verify.verify(str(data_file)))  # type: ignore[no-untyped-call] # py-lmdb types no verify
    except lmdb.verify.VerifyError as error:
        return [str(error)]
