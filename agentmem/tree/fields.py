"""The fields of a stored record: a msgpack map, decoded within limits, each field checked as it is taken out.

The only file of tree/ that knows msgpack. Knows nothing of what the records are.
"""

from collections.abc import Mapping
from typing import cast

import msgpack

from agentmem.errors import CorruptionError, InvalidInputError
from agentmem.ids import BlockDigest, BlockHash, CheckpointId
from agentmem.marks import Mark, MarkInput, MarkKind, Marks
from agentmem.tree.checkpoint import BlockRef, StateRef

CHECKPOINT_ID_NBYTES = 16
HASH_NBYTES = 32

_PLAIN_ENTRIES = 16
_PLAIN_LENGTH = 256
"""Metadata of so few and short entries is copied without packing it: every fork copies its branch's."""

MAX_EXTRAS_NBYTES = 1 << 20
"""Most bytes of msgpack that the user's metadata of one record may take."""

_MAX_RECORD_NBYTES = 1 << 28
_LIMITS = {"max_str_len": 1 << 20, "max_bin_len": 1 << 28, "max_array_len": 1 << 20, "max_map_len": 1 << 16}
_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, msgpack.UnpackException)


def pack_map(fields: Mapping[str, object]) -> bytes:
    """Return a record's fields as a msgpack map."""
    return cast("bytes", msgpack.packb(fields, use_bin_type=True))


def copy_extras(extras: Mapping[str, object]) -> dict[str, object]:
    """Return a deep copy of the user's metadata as a resume would give it back (tuples become lists).

    Raises:
        InvalidInputError: It holds what msgpack cannot (other than None, bool, int, float, str, bytes, list, dict with
            keys of str), or takes more than `MAX_EXTRAS_NBYTES`.
    """
    if len(extras) <= _PLAIN_ENTRIES and all(map(_is_plain, extras.keys(), extras.values())):
        return dict(extras)
    try:
        data = pack_map(dict(extras))
        copy = _unpack(data)
    except _ERRORS as error:
        raise InvalidInputError(f"extras cannot be stored ({error}): use plain dicts, lists and text") from error
    if len(data) > MAX_EXTRAS_NBYTES:
        raise InvalidInputError(f"extras take {len(data):,} bytes; at most {MAX_EXTRAS_NBYTES:,} are stored")
    return copy


def own_extras(extras: Mapping[str, object]) -> dict[str, object]:
    """Return what agentmem itself keeps in a branch's metadata: it goes on to every checkpoint."""
    return {key: value for key, value in extras.items() if key.startswith("agentmem.")}


def _is_plain(key: object, value: object) -> bool:
    """Say whether an entry is small and cannot be changed in place: a copy of the dict is a deep copy of it."""
    if not _is_plain_text(key):
        return False
    if isinstance(value, bool | float) or value is None:
        return True
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return _is_plain_text(value) or (isinstance(value, bytes) and len(value) <= _PLAIN_LENGTH)


def _is_plain_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _PLAIN_LENGTH and value.isascii()


class Fields:
    """The fields of one record. Each method takes one out, or raises CorruptionError naming record and field."""

    __slots__ = ("_fields", "_name")

    def __init__(self, name: str, value: bytes) -> None:
        """Decode `value`.

        Args:
            name: What the record is, for messages.
            value: The msgpack map.

        Raises:
            CorruptionError: `value` is no msgpack map, or goes beyond the limits.
        """
        self._name = name
        if len(value) > _MAX_RECORD_NBYTES:
            raise CorruptionError(f"{name} is damaged: {len(value):,} bytes")
        try:
            self._fields = _unpack(value)
        except _ERRORS as error:
            raise CorruptionError(f"{name} is damaged: {type(error).__name__}: {error}") from error

    def count(self, key: str) -> int:
        """Take a whole number of 0 or more."""
        value = self._fields.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key)
        return value

    def number(self, key: str) -> float:
        """Take a number."""
        value = self._fields.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key)
        return float(value)

    def text(self, key: str) -> str:
        """Take a text."""
        value = self._fields.get(key)
        if not isinstance(value, str):
            raise self._wrong(key)
        return value

    def flag(self, key: str) -> bool:
        """Take a yes or no."""
        value = self._fields.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key)
        return value

    def mapping(self, key: str) -> dict[str, object]:
        """Take the user's metadata."""
        value = self._fields.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key)
        return cast("dict[str, object]", value)

    def data(self, key: str, length: int | None = None, *, multiple_of: int = 1) -> bytes:
        """Take bytes, of `length` when it is given."""
        value = self._fields.get(key)
        if not isinstance(value, bytes) or len(value) % multiple_of or length not in {None, len(value)}:
            raise self._wrong(key)
        return value

    def checkpoint_id(self, key: str) -> CheckpointId | None:
        """Take a checkpoint's id, or nothing."""
        if self._fields.get(key) is None:
            return None
        return CheckpointId(self.data(key, CHECKPOINT_ID_NBYTES))

    def states(self, key: str) -> tuple[StateRef, ...]:
        """Take references to layer states, each a position and digests that stand behind one another."""
        value = self._fields.get(key)
        try:
            return tuple(_state(entry) for entry in cast("list[object]", value))
        except (TypeError, ValueError) as error:
            raise self._wrong(key) from error

    def marks(self, key: str) -> Marks:
        """Take marks."""
        value = self._fields.get(key)
        try:
            return tuple(_mark(entry) for entry in cast("list[object]", value))
        except (TypeError, ValueError) as error:
            raise self._wrong(key) from error

    def refs(self, key: str) -> tuple[BlockRef, ...]:
        """Take block references that stand behind one another; nothing counts as none."""
        if self._fields.get(key) is None:
            return ()
        data = self.data(key, multiple_of=2 * HASH_NBYTES)
        middles = range(HASH_NBYTES, len(data), 2 * HASH_NBYTES)
        return tuple(
            BlockRef(BlockHash(data[at - HASH_NBYTES : at]), BlockDigest(data[at : at + HASH_NBYTES])) for at in middles
        )

    def _wrong(self, key: str) -> CorruptionError:
        return CorruptionError(f"{self._name} is damaged: field {key!r} is {type(self._fields.get(key)).__name__}")


def fields_of_marks(marks: Marks) -> list[object]:
    """Return marks as msgpack holds them."""
    return [
        [
            mark.kind.value,
            mark.start,
            mark.stop,
            mark.digest,
            mark.payload,
            [[each.name, each.dtype, list(each.shape), each.value] for each in mark.inputs],
            None if mark.origin is None else list(mark.origin),
        ]
        for mark in marks
    ]


def _state(entry: object) -> StateRef:
    position, data = cast("list[object]", entry)
    if type(position) is not int or type(data) is not bytes or not data or len(data) % HASH_NBYTES:
        raise ValueError("no reference to a layer state")
    digests = (BlockDigest(data[at : at + HASH_NBYTES]) for at in range(0, len(data), HASH_NBYTES))
    return StateRef(position, tuple(digests))


def _mark(entry: object) -> Mark:
    kind, start, stop, digest, payload, inputs, origin = cast("list[object]", entry)
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
        raise ValueError("no place of a mark")
    return Mark(
        kind=MarkKind(cast("str", kind)),
        start=start,
        stop=stop,
        digest=_name(digest),
        payload=None if payload is None else BlockDigest(_name(payload)),
        inputs=tuple(_mark_input(each) for each in cast("list[object]", inputs)),
        origin=None if origin is None else _origin(origin),
    )


def _mark_input(entry: object) -> MarkInput:
    name, dtype, shape, value = cast("list[object]", entry)
    lengths = tuple(cast("list[int]", shape))
    if not all(type(text) is str for text in (name, dtype, value)) or not all(type(each) is int for each in lengths):
        raise ValueError("no model input")
    return MarkInput(name=cast("str", name), dtype=cast("str", dtype), shape=lengths, value=cast("str", value))


def _origin(entry: object) -> tuple[CheckpointId, int]:
    checkpoint_id, position = cast("list[object]", entry)
    if type(checkpoint_id) is not bytes or len(checkpoint_id) != CHECKPOINT_ID_NBYTES or type(position) is not int:
        raise ValueError("no origin of a splice")
    return CheckpointId(checkpoint_id), position


def _name(value: object) -> bytes:
    if type(value) is not bytes or len(value) != HASH_NBYTES:
        raise ValueError("no name of 32 bytes")
    return value


def _unpack(data: bytes) -> dict[str, object]:
    """Decode one map within limits; whatever is wrong with it is one of `_ERRORS`."""
    fields = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0, **_LIMITS)
    if not isinstance(fields, dict):
        raise ValueError("not a map")  # noqa: TRY004  # the value is wrong, not its Python type
    return cast("dict[str, object]", fields)
