"""Every weight of a model, told apart: the model's own, and those of the adapters that are at work.

Also notices, in microseconds, that they may be others than when they were last looked at. Reads no bytes.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentmem.adapters.transformers.lora import (
    Table,
    active_names,
    inner_layer,
    is_by_adapter,
    merged_names,
    parts,
    plain_values,
    setting_names,
    tables,
)
from agentmem.errors import UnsupportedModelError

_SELF_CHANGING = ("dynamic", "longrope")
"""Rotary schemes that overwrite their frequencies in a forward pass; the first ones are kept beside them."""

_SAVES = ("_save_to_state_dict", "state_dict", "get_extra_state")
"""What a module overrides that keeps weights elsewhere than in parameters and buffers."""

_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight, or several that one module keeps together.

    Attributes:
        name: Where it is in the model without adapters.
        read: Returns it: a tensor, or tensors and plain values in dicts.
        tensors: While these stay as they are, so does what `read` returns. Empty when there is no telling.
        merged: The adapters that were added to it; None when no tuner layer wraps it.
    """

    name: str
    read: Callable[[], object]
    tensors: tuple[Tensor, ...] = ()
    merged: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a module's table.

    Attributes:
        table: The module's live table.
        key: The entry's name in it.
    """

    table: Table
    key: str


@dataclass(slots=True)
class Survey:
    """What there is in a model.

    Attributes:
        own: The weights of the model itself, sorted by name. They are the same without adapters, with adapters that are
            disabled, and after the last one was deleted.
        adapters: What the active adapters consist of: a place, and a tensor or plain values; not what they are called.
        tensors: Where the parameters and buffers of both are.
        links: Where the modules are that lead to them, and parameters that might be there but are None.
        tuners: The tuner layers.
    """

    own: list[Weight] = field(default_factory=list)
    adapters: list[tuple[str, object]] = field(default_factory=list)
    tensors: list[Place] = field(default_factory=list)
    links: list[Place] = field(default_factory=list)
    tuners: list[nn.Module] = field(default_factory=list)


def survey(model: PreTrainedModel) -> Survey:
    """Walk over all modules of a model. Milliseconds.

    Raises:
        InvalidInputError: The adapters are as a forward pass would change them.
        UnsupportedModelError: A module keeps weights where they cannot be read.
    """
    walk = _Walk(is_quantised=getattr(model, "hf_quantizer", None) is not None)
    walk.visit(model, "", None)
    walk.found.own.sort(key=lambda weight: weight.name)
    return walk.found


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each change in place; -1 for a tensor of inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001  # torch has no other name for it


def address_of(tensor: Tensor) -> int:
    """Return where a tensor's bytes are; 0 for one that has none of its own, but holds other tensors."""
    return 0 if _is_wrapper(tensor) else tensor.data_ptr()


class Watch:
    """Notices that a model may have changed since a survey. It may err on that side, and sees no writes to `.data`."""

    def __init__(self, found: Survey) -> None:
        """Remember what the survey found, as it is now."""
        self._tensors = _Lookup(found.tensors)
        self._links = _Lookup(found.links)
        self._linked = self._links.read()
        self._held = self._tensors.read()  # no other tensor may take the address of one of these
        self._version = _VERSION if not any(map(Tensor.is_inference, self._held)) else version_of
        self._versions = list(map(self._version, self._held))
        self._address = Tensor.data_ptr if not any(map(_is_wrapper, self._held)) else address_of
        self._addresses = list(map(self._address, self._held))
        self._settings = _Settings.of_all(found.tuners)
        self.has_tuners = len(found.tuners) > 0

    def is_quiet(self) -> bool:
        """Say whether nothing seems to have changed. Costs microseconds (benchmarks/open.py)."""
        if self._links.read() != self._linked or not all(settings.are_kept() for settings in self._settings):
            return False
        try:
            tensors = self._tensors.read()
            return (
                list(map(self._address, tensors)) == self._addresses
                and list(map(self._version, tensors)) == self._versions
            )
        except TypeError:  # a place holds no tensor any more
            return False


class _Lookup:
    """Many entries of many tables, read in one go."""

    def __init__(self, places: list[Place]) -> None:
        self._tables = [place.table for place in places]
        self._keys = [place.key for place in places]

    def read(self) -> list[Any]:
        """Return what is at the places; None where there is no such entry any more."""
        return list(map(dict.get, self._tables, self._keys))  # type: ignore[arg-type]  # tables are dicts of any values


@dataclass(frozen=True, slots=True)
class _Settings:
    """What tuner layers of one kind were set to.

    Attributes:
        read: Reads a layer's settings.
        layers: The layers.
        kept: Copies of their settings then.
    """

    read: Callable[[nn.Module], object]
    layers: list[nn.Module]
    kept: list[object]

    @classmethod
    def of_all(cls, tuners: list[nn.Module]) -> "list[_Settings]":
        """Return the settings of layers of any kind."""
        by_names: dict[tuple[str, ...], list[nn.Module]] = {}
        for layer in tuners:
            by_names.setdefault(setting_names(layer), []).append(layer)
        return [cls._of(attrgetter(*names), layers) for names, layers in by_names.items()]

    @classmethod
    def _of(cls, read: Callable[[nn.Module], object], layers: list[nn.Module]) -> "_Settings":
        return cls(read, layers, [copy.deepcopy(read(layer)) for layer in layers])

    def are_kept(self) -> bool:
        """Say whether the layers are set as they were."""
        return list(map(self.read, self.layers)) == self.kept


class _Walk:
    """A walk over a model's modules."""

    def __init__(self, *, is_quantised: bool) -> None:
        self.found = Survey()
        self._is_quantised = is_quantised
        self._seen: set[int] = set()

    def visit(self, module: nn.Module, name: str, merged: tuple[str, ...] | None) -> None:
        """Note the weights of a module and of all below it; `merged` as in `Weight`."""
        if not self._is_new(module):
            return
        inner = inner_layer(module)
        if inner is not None:
            self._visit_tuner(module, inner, name, merged)
        elif _saves_itself(module):
            self._note_saved(module, name, merged)
        else:
            self._note_plain(module, name, merged)
            for key, child in tables(module)[2].items():
                if isinstance(child, nn.Module):
                    self.visit(child, _join(name, key), merged)

    # -- the model's own weights

    def _note_plain(self, module: nn.Module, name: str, merged: tuple[str, ...] | None) -> None:
        parameters, buffers, children = tables(module)
        is_self_changing = _is_self_changing(module)
        for key, tensor in parameters.items():
            self._note_tensor(parameters, key, _join(name, key), tensor, merged)
        for key, tensor in buffers.items():
            if not (is_self_changing and _is_current_frequencies(key)):
                self._note_tensor(buffers, key, _join(name, key), tensor, merged)
        self.found.links.extend(Place(children, key) for key in children)
        for key, value in vars(module).items():
            self._note_attribute(_join(name, key), key, value)

    def _note_tensor(self, table: Table, key: str, name: str, tensor: object, merged: tuple[str, ...] | None) -> None:
        if not isinstance(tensor, Tensor):
            self.found.links.append(Place(table, key))
            return
        self.found.tensors.append(Place(table, key))
        if self._is_new(tensor):
            self._note(name, partial(_as_it_is, tensor), (tensor,), merged)

    def _note_attribute(self, name: str, key: str, value: object) -> None:
        """Note what a module keeps in a plain attribute: objects of a quantiser may hold weights."""
        if isinstance(value, torch.ScriptObject):
            raise UnsupportedModelError(
                f"the model keeps something in {name} that only TorchScript can read: a changed weight would go "
                f"unseen; quantise the model with a method that keeps tensors"
            )
        if self._is_quantised and key[0] != "_" and hasattr(value, "__dict__") and not isinstance(value, Tensor):
            tensors = tuple(_tensors_within(value, 3))
            if tensors:
                self._note(name, partial(_as_it_is, tensors), tensors, None)

    def _note_saved(self, module: nn.Module, name: str, merged: tuple[str, ...] | None) -> None:
        """Note a module that says itself what its weights are, as quantised ones do."""
        tensors: list[Tensor] = []
        for child in module.modules():
            for table in tables(child):
                for key, value in table.items():
                    is_tensor = isinstance(value, Tensor)
                    (self.found.tensors if is_tensor else self.found.links).append(Place(table, key))
                    tensors.extend([value] if isinstance(value, Tensor) else [])
        self._note(name, partial(_saved_state, module), tuple(tensors), merged)

    def _note(
        self, name: str, read: Callable[[], object], tensors: tuple[Tensor, ...], merged: tuple[str, ...] | None
    ) -> None:
        self.found.own.append(Weight(name=name, read=read, tensors=tensors, merged=merged))

    # -- adapters

    def _visit_tuner(self, layer: nn.Module, inner: nn.Module, name: str, merged: tuple[str, ...] | None) -> None:
        self.found.tuners.append(layer)
        children = tables(layer)[2]
        self.found.links.extend(Place(children, key) for key, child in children.items() if child is inner)
        self.visit(inner, name, (*(merged or ()), *merged_names(layer)))
        names = active_names(layer)
        if names:
            self._note_adapters(layer, name, names)

    def _note_adapters(self, layer: nn.Module, name: str, names: list[str]) -> None:
        """Note the parts of a tuner layer's adapters `names`, by rank instead of by name."""
        self.found.adapters.append((name, {"kind": type(layer).__name__, **plain_values(layer, names)}))
        for key, part in parts(layer):
            path = _join(name, key)
            if inner_layer(part) is not None:
                self.found.tuners.append(part)
                self._note_adapters(part, path, names)
            elif is_by_adapter(part):
                for table in tables(part):
                    for rank, adapter in enumerate(names):
                        self._note_part(table, adapter, f"{path}.{rank}")
            else:
                self._note_part(tables(layer)[2], key, path)
        for table in tables(layer)[:2]:
            for key in table:
                self._note_part(table, key, _join(name, key))

    def _note_part(self, table: Table, key: str, name: str) -> None:
        """Note an entry of a table with all that is below it, if there is one."""
        part = table.get(key)
        if isinstance(part, Tensor):
            self.found.tensors.append(Place(table, key))
            self.found.adapters.append((name, part))
        elif isinstance(part, nn.Module) and any(tables(part)):
            self.found.links.append(Place(table, key))
            for below in tables(part):
                for each in below:
                    self._note_part(below, each, _join(name, each))

    def _is_new(self, thing: object) -> bool:
        """Say whether a module or tensor is met for the first time: tied weights are met twice."""
        is_new = id(thing) not in self._seen
        self._seen.add(id(thing))
        return is_new


def _is_wrapper(tensor: Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _as_it_is(value: object) -> object:
    return value


def _saves_itself(module: nn.Module) -> bool:
    kind = type(module)
    return not isinstance(module, PreTrainedModel) and any(
        getattr(kind, name) is not getattr(nn.Module, name) for name in _SAVES
    )


def _saved_state(module: nn.Module) -> object:
    """Return what a module saves, and the buffers that it does not."""
    return {**dict(module.named_buffers()), **module.state_dict(keep_vars=True)}


def _is_self_changing(module: nn.Module) -> bool:
    scheme = getattr(module, "rope_type", "")
    schemes = scheme.values() if isinstance(scheme, dict) else (scheme,)
    return any(known in str(each) for each in schemes for known in _SELF_CHANGING)


def _is_current_frequencies(key: str) -> bool:
    return key.endswith("inv_freq") and not key.endswith("original_inv_freq")


def _tensors_within(value: object, depth: int) -> Iterator[Tensor]:
    """Yield the tensors that an object holds, in the order of its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module) or not depth:
        return
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_within(item, depth - 1)
    else:
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for item in list(held.values()):
            yield from _tensors_within(item, depth - 1)
