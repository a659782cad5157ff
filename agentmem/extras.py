"""The user's metadata: plain values that can be stored, copied whenever they pass from one owner to another."""

from collections.abc import Mapping

from agentmem.errors import InvalidInputError

Extras = dict[str, object]


def copy_extras(extras: Mapping[str, object]) -> Extras:
    """Return a deep copy of `extras`.

    Raises:
        InvalidInputError: A key is no text, or a value is not None, bool, int, float, str, bytes, a list or a dict.
    """
    return {_key(key): _copy(value, key) for key, value in extras.items()} if extras else {}


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidInputError(f"extras: keys must be text; found {key!r}")
    return key


def _copy(value: object, name: str) -> object:
    if isinstance(value, dict):
        return {_key(key): _copy(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise InvalidInputError(
        f"extras[{name!r}] is a {type(value).__name__}, which cannot be stored; use None, bool, int, float, str, bytes, "
        f"lists and dicts"
    )
