"""What adapters make of a model: which layers wrap others, and which of their weights are at work.

LoRA and its relatives come from peft, which puts tuner layers in the place of the layers that they change. They are
known by what they have, so that peft need not be installed. Knows nothing of hashes.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import cast

from torch import Tensor, nn

from agentmem.errors import InvalidInputError, UnsupportedModelError

Table = Mapping[str, Tensor | nn.Module | None]
"""A module's own table of its parameters, its buffers or its children, by name."""

_SETTINGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "training")


def tables(module: nn.Module) -> tuple[Table, Table, Table]:
    """Return a module's own tables: parameters, buffers, children. They are live, and must not be changed."""
    own = vars(module)
    return own["_parameters"], own["_buffers"], own["_modules"]


def unwrapped(model: object) -> object:
    """Return the transformers model inside of a `peft.PeftModel`; any other object as it is.

    Raises:
        UnsupportedModelError: An adapter changes what the model is fed, or switches itself on within a text.
    """
    configs = getattr(model, "peft_config", None)
    if not hasattr(type(model), "get_base_model") or not isinstance(configs, Mapping):
        return model
    for name, config in configs.items():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        is_switched = kind in {"POLY", "XLORA"} or getattr(config, "alora_invocation_tokens", None)
        if is_switched or getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {name!r} is of kind {kind}, which feeds virtual tokens or switches itself on within a text: "
                f"KV would depend on more than a branch's tokens; use an adapter that only changes weights, like LoRA"
            )
    base: object = model.get_base_model()  # type: ignore[attr-defined]  # looked up above
    return base


def inner_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that a tuner layer wraps; None for any other module."""
    kind = type(module)
    if not hasattr(kind, "merged_adapters"):  # what all of peft's wrappers have, and nothing else
        return None
    inner = getattr(module, "base_layer" if hasattr(kind, "get_base_layer") else "original_module", None)
    return inner if isinstance(inner, nn.Module) else None


def merged_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the adapters whose weights a tuner layer has added to those of the layer that it wraps."""
    nested = (part for _, part in parts(layer) if inner_layer(part) is not None)
    merged = cast("Iterable[str]", layer.merged_adapters)
    return (*merged, *chain.from_iterable(merged_names(part) for part in nested))


def setting_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the attributes of a tuner layer that are changed while it stays in its place; it has two at least."""
    return tuple(name for name in _SETTINGS if hasattr(layer, name))


def active_names(layer: nn.Module) -> list[str]:
    """Return the adapters that a tuner layer applies, in the order that it does.

    Raises:
        InvalidInputError: The layer would change the model's own weights in the next pass, or drop out at random.
    """
    merged = merged_names(layer)
    if getattr(layer, "disable_adapters", False):
        if merged:
            raise InvalidInputError(
                f"adapters are merged ({', '.join(merged)}) and disabled at once: the next forward pass would change "
                f"the model's own weights; call unmerge_adapter(), or enable the adapters"
            )
        return []
    if merged:
        return []  # what was merged is among the layer's own weights, and no other adapter is applied
    names = [name for name in getattr(layer, "active_adapters", ()) if _has_adapter(layer, name)]
    if layer.training and names:
        _check_no_dropout(layer, names)
    return names


def plain_values(layer: nn.Module, names: list[str]) -> dict[str, object]:
    """Return what a tuner layer holds of the adapters `names` beside tensors: ranks, scalings, switches."""
    own = {key: value for key, value in vars(layer).items() if key[0] != "_" and key not in {"training", "kwargs"}}
    kept: dict[str, object] = {
        key: value for key, value in own.items() if value is None or isinstance(value, bool | int | float | str)
    }
    for key, value in own.items():
        if isinstance(value, dict) and any(name in value for name in names):
            kept[key] = [value.get(name) for name in names]
    return kept


def parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a tuner layer that belong to its adapters."""
    inner = inner_layer(layer)
    for name, child in tables(layer)[2].items():
        if isinstance(child, nn.Module) and child is not inner:
            yield name, child


def is_by_adapter(part: nn.Module) -> bool:
    """Say whether a part of a tuner layer is a table with an entry for each adapter, rather than shared by them."""
    return hasattr(type(part), "keys")


def _has_adapter(layer: nn.Module, name: str) -> bool:
    """Say whether an adapter changes the layer at all: it may have been given to others only."""
    if any(isinstance(value, dict) and name in value for key, value in vars(layer).items() if key[0] != "_"):
        return True
    for _, part in parts(layer):
        if inner_layer(part) is not None and _has_adapter(part, name):
            return True
        if is_by_adapter(part) and any(name in table for table in tables(part)):
            return True
    return False


def _check_no_dropout(layer: nn.Module, names: list[str]) -> None:
    """Refuse adapters that drop out: one that is added to a model in eval mode is in training mode itself."""
    rates = [
        value.get(name)
        for key, value in vars(layer).items()
        if "dropout" in key and isinstance(value, dict)
        for name in names
    ]
    modules = (module for _, part in parts(layer) for module in part.modules())
    rates.extend(module.p for module in modules if isinstance(module, nn.Dropout) and module.training)
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        raise InvalidInputError(
            f"adapter {', '.join(names)} is in training mode, where dropout changes KV at random; call model.eval()"
        )
