"""Images, audio and other model inputs behind a branch's tokens: which tokens stand for them, and what a pass is given.

What a model takes is read off its `forward` and its config. Knows nothing of where inputs are stored.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentmem.adapter import Feed
from agentmem.adapters.transformers.continuation import plain_tokens
from agentmem.adapters.transformers.regimes import settled
from agentmem.errors import InvalidInputError
from agentmem.kv.hashing import hash_fields
from agentmem.marks import Mark, MarkInput, MarkKind, Marks

Inputs = Mapping[str, object]
"""Model inputs by keyword: tensors, and values that JSON can hold."""

TYPE_INPUT = "token_type_ids"
"""How the names of token_type_ids and their like end: one entry per token; other than 0 for a token of media."""

_MASK = "attention_mask"
_ENCODED = "mm_encoder_outputs"
_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_token_(id|index)")
_OURS = frozenset(
    {"input_ids", "inputs_embeds", "position_ids", "cache", "past_key_values", "use_cache", "cache_position", "labels"}
    | {"logits_to_keep", "encoder_outputs", _ENCODED, "encoder_hidden_states", "encoder_attention_mask"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "shared_kv_states"}
)
"""What a forward pass is given by the branch, or changes what it returns."""


class Source(Protocol):
    """Where inputs are kept."""

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Return the model inputs behind a mark, tensors on the CPU."""
        ...


class MediaInputs:
    """What one decoder-only model takes beside tokens."""

    def __init__(self, model: PreTrainedModel, *, needs_token_types: bool) -> None:
        """Read what the model takes.

        Args:
            model: The model.
            needs_token_types: Whether it finds the positions of media by token types.
        """
        self._model = model
        self._takes = inspect.signature(model.forward).parameters.keys()
        self._taken = taken_inputs(model)
        self._needs_token_types = needs_token_types and any(name.endswith(TYPE_INPUT) for name in self._taken)
        self._is_neutral: dict[str, bool] = {}
        self._is_whole: dict[str, bool] = {}
        self.placeholders = _placeholders(model)

    def spans(self, tokens: Sequence[int], inputs: Inputs, position: int) -> list[tuple[MarkKind, int, int]]:
        """Return the span of `tokens` that stands for `inputs`: from the first placeholder to the last.

        Raises:
            InvalidInputError: The model takes no such input, the tokens have no placeholder for it, or placeholders
                come without inputs.
        """
        given = self._checked(tokens, inputs)
        held = [index for index, token in enumerate(tokens) if token in self.placeholders]
        if not given:
            self._check_filled([tokens[index] for index in held], position)
            return []
        marked = _marked(inputs) or held
        if not marked:
            raise InvalidInputError(
                f"none of the {len(tokens):,} tokens stands for the inputs {sorted(given)}: the model's placeholders "
                f"are {self._described()}. Append the ids and inputs together, as the model's processor makes them"
            )
        first, stop = marked[0], marked[-1] + 1
        self._check_filled([tokens[index] for index in held if not first <= index < stop], position)
        return [(MarkKind.MEDIA, first, stop)]

    def check_pass(self, marks: Marks, start: int, tokens: Sequence[int]) -> None:
        """Refuse a pass that cuts media, or feeds placeholders that nothing was given for.

        Raises:
            InvalidInputError: It does.
        """
        stop = start + len(tokens)
        for mark in marks:
            if mark.kind is MarkKind.MEDIA and mark.start < stop and mark.stop > start:
                if not start <= mark.start or mark.stop > stop:
                    raise InvalidInputError(
                        f"the pass over the tokens [{start:,}, {stop:,}) cuts the media at [{mark.start:,}, "
                        f"{mark.stop:,}): feed all of its tokens in one pass"
                    )
                tokens = [*tokens[: mark.start - start], *[-1] * (mark.stop - mark.start), *tokens[mark.stop - start :]]
        self._check_filled([token for token in tokens if token in self.placeholders], start)

    def of(self, feed: Feed, start: int, stop: int) -> dict[str, object]:
        """Return what a pass over the tokens [start, stop) takes beside them; tensors on the model's device.

        Raises:
            InvalidInputError: The inputs of several media in the pass can't be put together.
            NotFoundError: Inputs are in no tier any more.
        """
        marks = tuple(mark for mark in media(feed.marks, stop) if mark.start >= start)
        if not marks:
            return {}
        kept = [_essential(feed.inputs(mark)) for mark in marks]
        joined = _join(kept)
        for name in {name for inputs in kept for name, _ in _token_inputs(inputs)}:
            first = 0 if self._wants_all(name) else start
            joined[name] = _spread(name, kept, marks, first, stop)
        if _ENCODED in self._takes:
            joined[_ENCODED] = None  # transformers' generation puts an empty one there, which excludes the inputs
        device = self._model.device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in joined.items()}

    def positional(self, source: Source, marks: Marks, num_tokens: int) -> dict[str, object]:
        """Return the inputs of all `marks` that positions of `num_tokens` tokens may depend on, on the CPU."""
        kept = [_essential(source.inputs(mark)) for mark in marks]
        joined = _join([{name: value for name, value in inputs.items() if not _is_content(value)} for inputs in kept])
        for name in {name for inputs in kept for name, _ in _token_inputs(inputs)}:
            joined[name] = _spread(name, kept, marks, 0, num_tokens)
        return joined

    def stops(self, marks: Marks, start: int, stop: int) -> list[int]:
        """Return where to end passes over [start, stop), so that each one's media can be put together."""
        inside = [mark for mark in media(marks, stop) if mark.start >= start]
        return [second.start for first, second in pairwise(inside) if not _can_join(first, second)] + [stop]

    def _checked(self, tokens: Sequence[int], inputs: Inputs) -> dict[str, object]:
        """Return the inputs that say something, having checked them all."""
        check_taken(inputs, self._taken, self._model)
        for name, value in _token_inputs(inputs):
            _check_per_token(name, value, len(tokens))
            self.check_neutral(name)
        given = _essential(inputs)
        if given and "cross_attention_mask" in self._taken:
            raise InvalidInputError(
                f"{type(self._model).__name__} reads {sorted(given)} through cross-attention in its decoder, whose KV "
                f"agentmem does not store yet; nothing was appended"
            )
        if given and self._needs_token_types and not _token_inputs(inputs):
            raise InvalidInputError(
                f"the model finds the positions of media by token types: give mm_token_type_ids with "
                f"{sorted(given)}, as its processor returns them; nothing was appended"
            )
        return given

    def _check_filled(self, held: Sequence[int], position: int) -> None:
        if held:
            raise InvalidInputError(
                f"the token {held[0]} ({self.placeholders[held[0]]}), at position {position:,} or after, stands for "
                f"media that nothing was given for; append it together with the model's inputs, such as pixel_values"
            )

    def _described(self) -> str:
        return ", ".join(f"{token} ({name})" for token, name in self.placeholders.items()) or "unknown"

    def check_neutral(self, name: str) -> None:
        """Refuse a per-token input whose zeros are not plain text; measured on the model when first asked.

        Raises:
            InvalidInputError: Zeros change the logits: KV would depend on them, or on tokens that come after.
        """
        if name not in self._is_neutral:
            ids = self._text(3)
            zeros = {name: torch.zeros_like(ids)}
            with torch.no_grad(), settled(self._model):
                plain, typed = (self._model(input_ids=ids, use_cache=False, **given).logits for given in ({}, zeros))
            self._is_neutral[name] = torch.allclose(plain.float(), typed.float(), rtol=1e-3, atol=1e-3)
        if not self._is_neutral[name]:
            raise InvalidInputError(
                f"{type(self._model).__name__} reads {name} of 0 otherwise than none at all (some models let such "
                f"tokens attend to tokens after them): KV can't be kept by prefix with it; leave it out"
            )

    def _wants_all(self, name: str) -> bool:
        """Tell whether the model reads a per-token input from the sequence's start on, not from the pass's."""
        if name not in self._is_whole:
            ids = self._text(3)
            prepared = self._model.prepare_inputs_for_generation(  # type: ignore[operator]  # mixin method
                ids, next_sequence_length=1, is_first_iteration=True, use_cache=True, **{name: torch.zeros_like(ids)}
            )
            self._is_whole[name] = isinstance(prepared[name], Tensor) and prepared[name].shape[-1] == 3
        return self._is_whole[name]

    def _text(self, num_tokens: int) -> Tensor:
        return torch.tensor([plain_tokens(self._model, num_tokens)], device=self._model.device)


def taken_inputs(model: PreTrainedModel, *free: str) -> frozenset[str]:
    """Return the names of the inputs that the model's `forward` takes, without those that a branch fills in.

    Args:
        model: The model.
        *free: What a branch does not fill in for this model.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset(name for name in named - (_OURS - {*free}) if not name.startswith("decoder_"))


def check_taken(inputs: Inputs, taken: frozenset[str], model: PreTrainedModel) -> None:
    """Refuse inputs that the model does not take, and masks that hide something.

    Raises:
        InvalidInputError: Names them, and what the model takes.
    """
    unknown = sorted(inputs.keys() - taken)
    if unknown:
        names = sorted(taken - {_MASK}) or ["no inputs"]
        raise InvalidInputError(
            f"{type(model).__name__} takes {', '.join(names)} beside tokens; found {', '.join(unknown)}. Nothing was "
            f"appended"
        )
    mask = inputs.get(_MASK)
    if mask is not None and not (isinstance(mask, Tensor) and bool((mask == 1).all())):
        raise InvalidInputError(
            "attention_mask hides inputs: a branch is one sequence without padding. Take the padding off the inputs "
            "and leave the mask out; nothing was appended"
        )


def media(marks: Marks, stop: int) -> Marks:
    """Return the marks of media that end at `stop` or before."""
    return tuple(mark for mark in marks if mark.kind is MarkKind.MEDIA and mark.stop <= stop)


def media_digest(inputs: Inputs) -> bytes:
    """Return 32 bytes that name inputs by content: names, dtypes, shapes, bytes and plain values.

    What says nothing about the media is left out: a mask of ones, and the text around placeholders.
    """
    essential = _essential(inputs)
    fields = []
    for name in sorted(essential):
        value = essential[name]
        fields.append(hash_fields(b"input", (name.encode(), *_content(value))))
    return hash_fields(b"agentmem/media/1", fields)


def _content(value: object) -> tuple[bytes, ...]:
    if not isinstance(value, Tensor):
        return (b"json", json.dumps(value, sort_keys=True).encode())
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.blake2b(data.numpy().data, digest_size=32).digest()
    return (str(value.dtype).encode(), json.dumps(list(value.shape)).encode(), digest)


def _placeholders(model: PreTrainedModel) -> dict[int, str]:
    """Return the token ids that stand for media, with their names in the config."""
    config = model.config.to_dict()
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    named = [(str(key), value) for part in parts for key, value in part.items() if _PLACEHOLDER.fullmatch(str(key))]
    return {value: key for key, value in named if isinstance(value, int) and not isinstance(value, bool)}


def _token_inputs(inputs: Inputs) -> list[tuple[str, Tensor]]:
    return [(n, value) for n, value in inputs.items() if n.endswith(TYPE_INPUT) and isinstance(value, Tensor)]


def _marked(inputs: Inputs) -> list[int]:
    """Return the indices of the tokens that per-token inputs mark as media."""
    rows = [value.reshape(-1) for _, value in _token_inputs(inputs)]
    return sorted({index for row in rows for index in row.nonzero().flatten().tolist()})


def _check_per_token(name: str, value: Tensor, num_tokens: int) -> None:
    """Refuse a per-token input that is not one sequence as long as the tokens.

    Raises:
        InvalidInputError: It is not.
    """
    if value.ndim not in (1, 2) or value.shape[-1] != num_tokens or value.numel() != num_tokens:
        raise InvalidInputError(
            f"{name} of shape {list(value.shape)} does not fit {num_tokens:,} tokens: it has one entry for each; "
            f"nothing was appended"
        )


def _essential(inputs: Inputs) -> dict[str, object]:
    """Return inputs without a mask of ones, and per-token inputs cut to the tokens of media: `[1, tokens]`."""
    marked = _marked(inputs)
    kept = {name: value for name, value in inputs.items() if name != _MASK and value is not None}
    for name, value in _token_inputs(inputs):
        if marked:
            kept[name] = value.reshape(1, -1)[:, marked[0] : marked[-1] + 1]
        else:
            del kept[name]
    return kept


def _spread(name: str, kept: Sequence[Inputs], marks: Marks, first: int, stop: int) -> Tensor:
    """Lay a per-token input of several media over the tokens [first, stop): `[1, tokens]`, 0 between them."""
    values = [inputs.get(name) for inputs in kept]
    dtype = next(value.dtype for value in values if isinstance(value, Tensor))
    row = torch.zeros(1, stop - first, dtype=dtype)
    for value, mark in zip(values, marks, strict=True):
        if isinstance(value, Tensor):
            row[:, mark.start - first : mark.stop - first] = value
    return row


def _join(kept: Sequence[Inputs]) -> dict[str, object]:
    """Put the inputs of several media together: tensors along their first dimension, lists end to end."""
    names = sorted({name for inputs in kept for name in inputs if not name.endswith(TYPE_INPUT)})
    return {name: _joined(name, [inputs[name] for inputs in kept if name in inputs], len(kept)) for name in names}


def _joined(name: str, values: Sequence[object], num_media: int) -> object:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and len({(value.shape[1:], value.dtype) for value in tensors}) == 1:
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if all(isinstance(value, list) for value in values):
        return [item for value in values if isinstance(value, list) for item in value]
    if len(values) == num_media and all(not isinstance(v, Tensor) and v == values[0] for v in values):
        return values[0]
    raise InvalidInputError(
        f"the media of one pass can't be put together: their inputs {name!r} differ in kind, shape or value. Feed "
        f"them in passes of their own: branch.forward() after each append"
    )


def _can_join(first: Mark, second: Mark) -> bool:
    """Tell from their descriptions whether the inputs of two media can be given to one pass."""
    one, other = ({given.name: given for given in mark.inputs} for mark in (first, second))
    return all(_fits(one.get(name), other.get(name)) for name in one.keys() | other.keys())


def _fits(first: MarkInput | None, second: MarkInput | None) -> bool:
    given = first or second
    if given is None or given.name == _MASK or given.name.endswith(TYPE_INPUT):
        return True
    if given.dtype == "json" and not given.value.startswith("["):
        return first is not None and second is not None and first.value == second.value
    if first is None or second is None:
        return True
    return first.dtype == second.dtype and first.shape[1:] == second.shape[1:]


def _is_content(value: object) -> bool:
    """Tell whether an input is pixels or sound, which no position depends on."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
