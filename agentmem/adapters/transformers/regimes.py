"""Rotary schemes whose frequencies depend on the length of the sequence: each branch's KV is held to one regime.

A model keeps frequencies on its modules, where one sequence's would leak into the next. Here they belong to the pass:
nothing on the model is changed, whoever else uses it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentmem.errors import UnsupportedModelError

SHORT, LONG = b"short", b"long"
"""The two regimes of longrope."""

_BUFFERS = ("inv_freq", "original_inv_freq")
"""The frequencies in use, and those that the module was made with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """A rotary scheme whose frequencies depend on the length of the sequence.

    Attributes:
        name: "dynamic" or "longrope".
        prefix: What the names of its buffers begin with: "" or a layer type and "_".
        limit: Tokens up to which its frequencies are the trained ones.
    """

    name: str
    prefix: str
    limit: int


class RotaryRegimes:
    """The rotary modules of a model whose frequencies depend on the length, held to one regime in each of our passes.

    Such a module decides from the positions of a single pass, and remembers. In our passes a private copy answers in
    its stead: one that never grew, and that is shown a position beyond the border when the branch is.
    """

    def __init__(self, model: PreTrainedModel, running: Callable[[], bytes | None]) -> None:
        """Take the modules' place in our passes, until `close`.

        Args:
            model: The model.
            running: Gives the regime of our pass that runs in this thread; None when none of ours does.

        Raises:
            UnsupportedModelError: A scheme is not known well enough to be held to a regime.
        """
        modules = {module: schemes for module in model.modules() if (schemes := _schemes(module))}
        borders = {scheme.limit for schemes in modules.values() for scheme in schemes if scheme.name == "longrope"}
        limits = [scheme.limit for schemes in modules.values() for scheme in schemes if scheme.name == "dynamic"]
        if len(borders) > 1:
            raise UnsupportedModelError(
                f"{type(model).__name__} has longrope layers that change at different lengths ({sorted(borders)}); "
                f"agentmem keeps one border per model"
            )
        self._border = next(iter(borders), None)
        self._limit = min(limits, default=None)
        self._steered = [_Steered(module, self._border, running) for module in modules]

    def regime(self, num_tokens: int) -> bytes:
        """Name the regime that KV of `num_tokens` tokens is in; b"" when no length matters.

        Raises:
            UnsupportedModelError: The KV of so many tokens would change with every further token.
        """
        if self._limit is not None and num_tokens > self._limit:
            raise UnsupportedModelError(
                f"the model's rotary positions are of the type 'dynamic', which beyond the trained length of "
                f"{self._limit:,} tokens changes the KV of every token with each new one; {num_tokens:,} tokens can't "
                f"be kept. Stay within {self._limit:,}, or load the model with a fixed scaling such as 'yarn'"
            )
        if self._border is None:
            return b""
        return LONG if num_tokens > self._border else SHORT

    @property
    def is_needed(self) -> bool:
        """Whether the model has such modules."""
        return bool(self._steered)

    @property
    def has_border(self) -> bool:
        """Whether KV changes when a branch grows beyond a length."""
        return self._border is not None

    def close(self) -> None:
        """Leave the modules as they were found."""
        for steered in self._steered:
            steered.close()


class _Steered:
    """Stands where a rotary module's `forward` was, and answers our passes from private copies of the module."""

    __slots__ = ("_border", "_copies", "_module", "_running", "inner")

    def __init__(self, module: nn.Module, border: int | None, running: Callable[[], bytes | None]) -> None:
        self.inner: Callable[..., object] = module.forward
        self._module = module
        self._border = border
        self._running = running
        self._copies = {regime: _settled_copy(module) for regime in (b"", SHORT, LONG)}
        module.forward = self

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Compute cosines and sines as the module does: in the running pass's regime, if that pass is ours."""
        regime = self._running()
        if regime is None:
            return self.inner(*args, **kwargs)
        private = self._copies[regime]
        forward = type(private).forward
        if regime != LONG:
            return forward(private, *args, **kwargs)
        longer, named = self._lengthen(args, kwargs)
        return _shorten(forward(private, *longer, **named))

    def _lengthen(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Add a position beyond the border, from which the module reads that the sequence is a long one."""
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if not isinstance(positions, Tensor) or self._border is None:
            raise UnsupportedModelError(
                f"{type(self._module).__name__} was called without position_ids, so it can't be told that the "
                f"sequence is a long one"
            )
        longer = torch.cat([positions, torch.full_like(positions[..., :1], self._border)], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), dict(kwargs)

    @property
    def is_closed(self) -> bool:
        """Whether it only passes on."""
        return self._running is _nothing

    def close(self) -> None:
        """Give the module its `forward` back. Under another store's, it only stops to answer."""
        self._running = _nothing
        if vars(self._module).get("forward") is self:
            before = self._before()
            if getattr(before, "__func__", None) is type(self._module).forward:
                del self._module.forward
            else:
                self._module.forward = before

    def _before(self) -> Callable[..., object]:
        """Return what was there before, without those that were closed meanwhile."""
        before = self.inner
        while isinstance(before, _Steered) and before.is_closed:
            before = before.inner
        return before


def _nothing() -> None:
    return None


@contextlib.contextmanager
def settled(model: PreTrainedModel) -> Iterator[None]:
    """Show a model's length-dependent rotary buffers as they were when it was loaded; put back what was found.

    For whoever reads the model's buffers or feeds it: others may have fed it longer sequences before.
    """
    found = [(module, dict(module.named_buffers(recurse=False)), dict(vars(module))) for module in model.modules()]
    grown = [item for item in found if _schemes(item[0])]
    try:
        for module, _, _ in grown:
            _settle(module)
        yield
    finally:
        for module, buffers, attributes in grown:
            for name in set(vars(module)) - set(attributes):
                delattr(module, name)
            vars(module).update(attributes)
            for name, buffer in buffers.items():
                setattr(module, name, buffer)


def _schemes(module: nn.Module) -> list[_Scheme]:
    """Return the length-dependent schemes of one module; none for every other module.

    Raises:
        UnsupportedModelError: It has one, but not what is needed to hold it to a regime.
    """
    given = getattr(module, "rope_type", None)
    named = {"": given} if isinstance(given, str) else {f"{key}_": value for key, value in _items(given)}
    return [
        _scheme(module, name, prefix)
        for prefix, value in named.items()
        for name in ("dynamic", "longrope")
        if isinstance(value, str) and name in value
    ]


def _items(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, dict) else []


def _scheme(module: nn.Module, name: str, prefix: str) -> _Scheme:
    limit = getattr(module, "original_max_seq_len", None)
    if name == "longrope":
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        parameters = parameters.get(prefix.removesuffix("_"), parameters) if prefix else parameters
        limit = parameters.get("original_max_position_embeddings")
    has_buffers = all(isinstance(getattr(module, f"{prefix}{part}", None), Tensor) for part in _BUFFERS)
    if not isinstance(limit, int) or not has_buffers:
        raise UnsupportedModelError(
            f"{type(module).__name__} has {name!r} rotary positions, whose frequencies depend on the sequence's "
            f"length, without the buffers {prefix}{_BUFFERS[0]} and {prefix}{_BUFFERS[1]} and a known limit: its KV "
            f"can't be kept apart by length"
        )
    return _Scheme(name=name, prefix=prefix, limit=limit)


def _settle(module: nn.Module) -> None:
    """Put the buffers of a rotary module back to what they were when it was made."""
    for scheme in _schemes(module):
        original = getattr(module, f"{scheme.prefix}original_inv_freq")
        # Two tensors, as in a new module: a module that was reset by itself has one under both names.
        setattr(module, f"{scheme.prefix}inv_freq", original.clone())
        setattr(module, f"{scheme.prefix}original_inv_freq", original.clone())
        for name in ("max_seq_len_cached", f"{scheme.prefix}max_seq_len_cached"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, "original_max_seq_len", scheme.limit))


def _settled_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a rotary module with buffers of its own."""
    private = copy.copy(module)
    vars(private)["_buffers"] = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
    _settle(private)
    return private


def _shorten(output: object) -> object:
    """Take the last position off what a rotary module returned: `[..., tokens, dim]`, one tensor or several."""
    if isinstance(output, tuple):
        return tuple(_shorten(part) for part in output)
    if not isinstance(output, Tensor):
        raise UnsupportedModelError(f"a rotary module returned {type(output).__name__}; agentmem knows tensors only")
    return output[..., :-1, :]
