"""An encrypted store's rows and records: where each is found, and the box that its content is in.

A row is found under its `place`: its key, with the part that tells something (tables.py) replaced by 32 bytes that only
the store's key makes of it. What row.py calls the value of a row is a box (_crypto.py), bound to the table's name, a
NUL and the place, so that rows cannot be swapped. In the box:
    0  2  length of the telling part of the key, big-endian; this and the next only when there is one
    2  k  the telling part
 2+k   n  the value

The two rows that say how to read all others, `format` and `key` of table `meta`, are in no box. A record of the disk
tier is in one box as a whole, bound to "record", a NUL and the record's digest. Copies and checksums go around boxes:
healing, salvaging and compacting need no key.
"""

import struct

from agentmem._crypto import Boxes
from agentmem._format import FORMAT_KEY
from agentmem._lmdb.tables import Table, telling_start, telling_stop
from agentmem.errors import CorruptionError

KEY_KEY = b"key"
"""Key, in the table `meta`, of the record of an encrypted store's data key."""

_HIDDEN_NBYTES = 32
_LENGTH = struct.Struct(">H")
_PLAIN_ROWS = {FORMAT_KEY, KEY_KEY}
_RECORD = b"record\0"


class Place(bytes):
    """A damaged row's place, in the stead of its key, which nobody knows any more: whoever takes keys takes it."""

    __slots__ = ()


class Cipher:
    """Hides keys, and puts values and records into boxes and takes them out. Thread-safe."""

    __slots__ = ("_boxes",)

    def __init__(self, data_key: bytes) -> None:
        """Use the store's data key."""
        self._boxes = Boxes(data_key)

    def place(self, table: Table, key: bytes) -> bytes:
        """Return where the row `key` is found; of a prefix of keys, the prefix of their places."""
        start = telling_start(table, key)
        if start is None or start >= len(key) or isinstance(key, Place):
            return key
        stop = telling_stop(table, key)
        return key[:start] + self._boxes.hide(_bound(table, key[:stop])) + key[stop:]

    def close(self, table: Table, place: bytes, key: bytes, value: bytes) -> bytes:
        """Return the box for the row `key`, whose place is `place`."""
        if table is Table.META and key in _PLAIN_ROWS:
            return value
        start = telling_start(table, key)
        if start is not None:
            part = key[start : telling_stop(table, key)]
            value = _LENGTH.pack(len(part)) + part + value
        return self._boxes.seal(value, _bound(table, place))

    def open(self, table: Table, place: bytes, box: bytes) -> tuple[bytes, bytes]:
        """Return the key and the value of the row at `place`.

        Raises:
            CorruptionError: The box is another row's or store's, or was changed; the message names table and place.
        """
        if table is Table.META and place in _PLAIN_ROWS:
            return place, box
        value = self._boxes.open(box, _bound(table, place))
        if value is None:
            raise CorruptionError(f"row {place.hex()} of table {table.value!r} is not as it was encrypted")
        start = telling_start(table, place)
        if start is None:
            return place, value
        stop = _LENGTH.size + _LENGTH.unpack_from(value)[0]
        return place[:start] + value[_LENGTH.size : stop] + place[start + _HIDDEN_NBYTES :], value[stop:]

    def close_record(self, name: bytes, data: bytes) -> bytes:
        """Return the box for the record called `name`."""
        return self._boxes.seal(data, _RECORD + name)

    def open_record(self, name: bytes, box: memoryview) -> bytes:
        """Return the record called `name`.

        Raises:
            CorruptionError: The box is another record's or store's, or was changed; the message names the record.
        """
        data = self._boxes.open(box, _RECORD + name)
        if data is None:
            raise CorruptionError(f"block {name.hex()}: the stored record is not as it was encrypted")
        return data


def _bound(table: Table, place: bytes) -> bytes:
    return table.value.encode() + b"\0" + place
