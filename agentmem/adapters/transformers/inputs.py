"""What the user's own loop may give a model beside a branch's cache: nothing that KV would depend on in secret."""

from collections.abc import Mapping

import torch
from torch import Tensor

from agentmem.adapters.transformers.media import TYPE_INPUT
from agentmem.errors import InvalidInputError

_PLAIN = frozenset(
    {"input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask", "position_ids"}
    | {"decoder_position_ids", "logits_to_keep", "cache_position", "labels"}
)
_NUM_AXES = 3
"""Axes of media positions: time, height, width. A row before them is the text's."""


def read_tokens(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[int]:
    """Return the ids fed in this pass, given as `name` or as the first argument.

    Raises:
        InvalidInputError: There are none, or more than one sequence of them.
    """
    ids = kwargs.get(name, args[0] if args else None)
    embeds = name.replace("input_ids", "inputs_embeds")
    if kwargs.get(embeds) is not None or not isinstance(ids, Tensor):
        raise InvalidInputError(f"a branch stores token ids: pass {name}, not {embeds}, together with its cache")
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise InvalidInputError(
            f"{name} of shape {list(ids.shape)}: a branch takes one sequence, [1, tokens]; fork a branch for each"
        )
    return [int(token) for token in ids[0].tolist()]


def check_plain(inputs: Mapping[str, object], position: int, num_tokens: int, mask_name: str) -> list[str]:
    """Refuse inputs that would make KV depend on more than the tokens: padding, media.

    Returns:
        The names of per-token inputs of zeros: they say nothing, if the model takes them so.

    Raises:
        InvalidInputError: There are such inputs.
    """
    mask = inputs.get(mask_name)
    if isinstance(mask, Tensor) and (tuple(mask.shape) != (1, position + num_tokens) or not bool((mask == 1).all())):
        raise InvalidInputError(
            f"{mask_name} of shape {list(mask.shape)} hides tokens or does not cover all {position + num_tokens:,} "
            f"tokens of the branch; a branch stores no padding: leave the mask out"
        )
    zeros = []
    for name, value in inputs.items():
        if name.endswith(TYPE_INPUT) and isinstance(value, Tensor) and not bool(value.any()):
            zeros.append(name)
        elif name.endswith(TYPE_INPUT) and isinstance(value, Tensor):
            raise InvalidInputError(
                f"{name} other than 0 belong to the tokens' media: append both together, branch.append(ids, "
                f"{name}=..., ...), and leave them out here"
            )
        elif isinstance(value, Tensor) and name not in _PLAIN:
            raise InvalidInputError(
                f"the input {name!r} would not be part of the branch's identity here: append it together with its "
                f"tokens, branch.append(ids, {name}=...), and leave it out"
            )
    return zeros


def check_positions(given: object, wanted: Tensor, position: int) -> None:
    """Refuse positions other than those of the branch's next tokens.

    Plain counting is fine also where media give positions several axes: whoever counts does not know them.

    Args:
        given: What the model was given.
        wanted: What it is going to be given: `[1, tokens]`, or `[axes, 1, tokens]`.
        position: Of the next token.

    Raises:
        InvalidInputError: They differ.
    """
    if not isinstance(given, Tensor):
        return
    num_tokens = wanted.shape[-1]
    counted = torch.arange(position, position + num_tokens)
    rows = given.detach().cpu().long().reshape(-1, given.shape[-1])
    is_counted = rows.shape[-1] == num_tokens and bool((rows == counted).all())
    # transformers' generation adds the delta of whichever sequence came last, and hands over one axis.
    is_shifted_axis = wanted.ndim == given.ndim == 3 and len(rows) == 1 and bool((rows.diff() == 1).all())
    if not (is_counted or (is_shifted_axis and rows.shape[-1] == num_tokens) or _are_axes(rows, wanted)):
        raise InvalidInputError(
            f"position_ids {given.flatten()[:4].tolist()}... are shifted: the branch stands at {position:,}, and its "
            f"positions follow from its tokens; leave position_ids out"
        )


def _are_axes(rows: Tensor, wanted: Tensor) -> bool:
    """Say whether rows are the wanted ones, with or without the row of the text before them."""
    axes = wanted.cpu().reshape(-1, wanted.shape[-1])
    return any(rows.shape == some.shape and torch.equal(rows, some) for some in (axes, axes[-_NUM_AXES:]))
