"""A model's config.json, read by names that mean the same: whoever wrote it may have called a size by another name.

Knows no family and no tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentmem.errors import InvalidInputError, NotFoundError

_INNER = ("text_config", "llm_config", "language_config")
"""Where models that also see or hear keep the configuration of what writes the text."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The configuration of one decoder.

    Attributes:
        values: What its config.json says.
    """

    values: Mapping[str, object]

    @property
    def model_type(self) -> str:
        """The family, as transformers names it; empty when the file does not say."""
        return str(self.values.get("model_type", ""))

    def has(self, name: str) -> bool:
        """Tell whether the file gives `name` a value that is not null."""
        return self.values.get(name) is not None

    def flag(self, name: str) -> bool:
        """Tell whether the file says that `name` is true."""
        return self.values.get(name) is True

    def number(self, *names: str, layer: int = 0) -> int | None:
        """Return the first of `names` that is there; None when none is. Where it is a list, that of `layer` counts.

        Raises:
            InvalidInputError: It is no whole number, or negative.
        """
        for name in names:
            value = self.values.get(name)
            if isinstance(value, list | tuple):
                value = value[layer] if layer < len(value) else None
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInputError(f"the model's configuration has {name} = {value!r}, which is no size")
            return value
        return None

    def need(self, *names: str, layer: int = 0) -> int:
        """Return the first of `names` that is there, as `number` does.

        Raises:
            InvalidInputError: None is, or it is no size.
        """
        found = self.number(*names, layer=layer)
        if found is None:
            raise InvalidInputError(
                f"the model's configuration ({self.model_type or 'of no model_type'}) has no {' or '.join(names)}, "
                f"without which its KV has no size; write it into the file"
            )
        return found

    def words(self, *names: str) -> list[str] | None:
        """Return the first of `names` that is a list of words; None when none is."""
        found = (self.values.get(name) for name in names)
        return next((each for each in found if isinstance(each, list) and is_words(each)), None)

    def indices(self, name: str) -> list[int] | None:
        """Return `name` when it is a list of whole numbers; None otherwise."""
        value = self.values.get(name)
        is_numbers = isinstance(value, list) and all(isinstance(item, int) for item in value)
        return list(value) if is_numbers and isinstance(value, list) else None

    def inner(self, name: str) -> "Fields":
        """Return the configuration inside of `name`; an empty one when there is none."""
        value = self.values.get(name)
        return Fields(value if isinstance(value, dict) else {})


def read_fields(config: Mapping[str, object]) -> Fields:
    """Return the configuration of what writes the text, also when it lies inside another's.

    Raises:
        InvalidInputError: It says nothing of layers.
    """
    outer = Fields(config)
    name = next((name for name in _INNER if outer.inner(name).values), None)
    if name is None:
        return outer
    inner = outer.inner(name)
    return Fields({"model_type": f"{outer.model_type}_text", **inner.values})


def load_config(path: Path) -> dict[str, object]:
    """Return what a config.json says; `path` is the file, or the model's folder.

    Raises:
        NotFoundError: There is no such file.
        InvalidInputError: It is no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no configuration at {str(file)!r}") from error
    except ValueError as error:
        raise InvalidInputError(f"{str(file)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"{str(file)!r} is no configuration: it holds a {type(found).__name__}")
    return found


def is_words(items: Sequence[object]) -> bool:
    """Tell whether all of `items` are text, and there are some."""
    return bool(items) and all(isinstance(item, str) for item in items)
