"""Positions of several axes, as models give them to images and video, and text after them a delta (M-RoPE).

A model keeps the delta on a module, where one sequence's would leak into the next. Here the positions of every pass
follow from the branch's tokens and media: nothing on the model is changed, whoever else uses it.
"""

import copy
import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from agentmem.adapters.transformers.geometry import unchanged
from agentmem.errors import UnsupportedModelError
from agentmem.marks import Marks, pack_marks

_PREPARE = "_prepare_position_ids_for_generation"
"""The method of transformers' models that computes positions from tokens and media."""

_NUM_TABLES = 128
"""Sequences whose positions are remembered; each token takes 32 bytes."""


class Known(Protocol):
    """What is known of a sequence: its tokens and the media among them."""

    def tokens(self, stop: int) -> list[int]:
        """Return the first `stop` tokens."""
        ...

    def positional(self, marks: Marks, num_tokens: int) -> Mapping[str, object]:
        """Return the inputs of the media `marks` that positions of the first `num_tokens` tokens may depend on."""
        ...


class MultiAxisPositions:
    """Positions of a model that gives media positions of several axes, and text after them a delta (M-RoPE).

    Transformers keeps the delta on a module, for whichever sequence came last. Here the positions of every pass are
    computed from the branch's tokens and media, by the model's own method, and passed explicitly.

    Source: transformers' models/qwen2_5_vl (get_rope_index, _prepare_position_ids_for_generation).
    """

    def __init__(self, model: PreTrainedModel, holder: str, text: Sequence[int]) -> None:
        """Read how the model positions text.

        Args:
            model: The model.
            holder: Name of the module that keeps the delta (see `delta_holder`).
            text: Three different tokens that stand for no media.

        Raises:
            UnsupportedModelError: The model does not take positions, or has no method to compute them.
        """
        if getattr(type(model), _PREPARE) is getattr(GenerationMixin, _PREPARE):
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps position deltas on a module ({holder}.rope_deltas), but has no method "
                f"that computes positions for generation: they would leak from one branch into another"
            )
        self._lock = threading.Lock()
        self._shadow, self._holder = _shadow(model, holder)
        self._device = model.device
        self._tables: OrderedDict[bytes, Tensor] = OrderedDict()
        self._text_token = text[0]
        self._text = self._compute([text[0]], {})
        self._prove(model, model.get_submodule(holder), text)

    def of(self, start: int, tokens: Sequence[int], marks: Marks, known: Known) -> Tensor:
        """Return the positions of `tokens`, `[axes, 1, number of them]`, as the model takes them.

        Args:
            start: Index of the first of the tokens in its sequence.
            tokens: The tokens of one pass.
            marks: The media up to the pass's end.
            known: Gives what is known of the sequence before.
        """
        stop = start + len(tokens)
        if not marks:
            return self.of_text(start, stop)
        length = marks[-1].stop + 1
        ids = known.tokens(length)
        if len(ids) < length:
            ids = [*ids[:start], *tokens, self._text_token][:length]
        table = self._table(ids, marks, known)
        # After the last media every axis grows by one a token.
        steps = torch.arange(max(start, length), max(stop, length)) - length + 1
        return torch.cat([table[..., start:stop], table[..., -1:] + steps], dim=-1).to(self._device)

    def of_text(self, start: int, stop: int) -> Tensor:
        """Return the positions of the tokens [start, stop) of a text without media."""
        return (self._text + torch.arange(start, stop)).to(self._device)

    def _table(self, tokens: Sequence[int], marks: Marks, known: Known) -> Tensor:
        """Return the positions of all tokens up to the last media, and of the one after it.

        With the one after it: some models count it together with the media.
        """
        key = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=32)
        for packed in pack_marks(marks, 0, len(tokens)):
            key.update(packed)
        name = key.digest()
        table = self._tables.get(name)
        if table is None:
            table = self._compute(tokens, known.positional(marks, len(tokens)))
            self._tables[name] = table
            while len(self._tables) > _NUM_TABLES:
                self._tables.popitem(last=False)
        return table

    def _compute(self, tokens: Sequence[int], inputs: Mapping[str, object]) -> Tensor:
        ids = torch.tensor([list(tokens)], dtype=torch.long)
        with self._lock:
            self._holder.rope_deltas = None  # type: ignore[assignment]  # a plain attribute of the copy
            prepare = getattr(self._shadow, _PREPARE)
            positions: Tensor = prepare(ids, {"attention_mask": torch.ones_like(ids), **inputs})
        return positions.cpu()

    def _prove(self, model: PreTrainedModel, holder: nn.Module, text: Sequence[int]) -> None:
        """Feed three tokens with positions beside a foreign delta: their logits must be those of a fresh model."""
        with unchanged(model):
            fresh = self._logits(model, holder, text, None)
            other = self._logits(model, holder, text, torch.full((1, 1), 7, device=self._device))
        if not torch.allclose(fresh, other, rtol=1e-3, atol=1e-4):
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps position deltas on a module and does not go by the position_ids it is "
                f"given: its positions would leak from one branch into another"
            )

    def _logits(self, model: PreTrainedModel, holder: nn.Module, text: Sequence[int], delta: Tensor | None) -> Tensor:
        """Return the logits after two tokens and one more; with positions if there is a delta to be ignored."""
        cache, logits = None, torch.empty(0)
        for first, stop in ((0, 2), (2, 3)):
            holder.rope_deltas = delta if first else None  # type: ignore[assignment]  # a plain attribute
            options = {} if delta is None else {"position_ids": self.of_text(first, stop)}
            ids = torch.tensor([text[first:stop]], device=self._device)
            with torch.no_grad():
                output = model(input_ids=ids, cache=cache, use_cache=True, **options)
            cache, logits = output.cache, output.logits[:, -1].float()
        return logits


def delta_holder(model: PreTrainedModel) -> str | None:
    """Return the name of the module that keeps position deltas, "" for the model itself; None when none does."""
    names = [name for name, module in model.named_modules() if hasattr(module, "rope_deltas")]
    # Some classes inherit the attribute and never use it: what computes deltas has this method.
    used = [name for name in names if hasattr(model.get_submodule(name), "get_rope_index")]
    used = used or (names if hasattr(model, "get_rope_index") else [])
    if len(used) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps position deltas on several modules ({', '.join(used)}); agentmem knows one"
        )
    return used[0] if used else None


def _shadow(model: PreTrainedModel, holder: str) -> tuple[PreTrainedModel, nn.Module]:
    """Return a copy of the model that shares all but the delta, and the module of the copy that holds it."""
    shadow = copy.copy(model)
    module: nn.Module = shadow
    for name in holder.split(".") if holder else ():
        vars(module)["_modules"] = dict(vars(module)["_modules"])
        child = copy.copy(module.get_submodule(name))
        vars(module)["_modules"][name] = child
        module = child
    return shadow, module
