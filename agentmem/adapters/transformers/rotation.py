"""How a model's keys change when their tokens move: found among rotary layouts, and proven on the model itself.

Nothing is believed of a model's name or config. A few tokens are fed at several positions, and what the layers wrote
there must be what turning their keys predicts. Knows nothing of branches.

Source: Leyline (arXiv 2606.01065) moves spans of history in closed form; the proof is ours.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from agentmem.adapters.transformers.geometry import cache_argument, unchanged
from agentmem.errors import UnsupportedModelError
from agentmem.kv.spec import KVSpec, LayerKind

NUM_PROBE_TOKENS = 16
"""Tokens that are fed at each position: their keys must be turned ones, all of them."""

SHIFTS = (1, 97, 32_768)
"""How far the probe moves: short for fast frequencies, long for slow ones. Further away the angles that the model
computes in fp32 are off by more than the tolerance."""

TOLERANCE_32, TOLERANCE_16, TOLERANCE_16_FIRST = 5e-3, 0.3, 0.03
"""Largest error of an element, against its size over the probe: in fp32 models, in 16-bit ones, and there in the first
layer, where no rounding has added up yet and any absolute position shows. Measured over 40 families and SmolLM2: at
most 1e-4, 0.07 and 0.005; a wrong layout or frequency gives more than 1."""


TOKENS_AT_ONCE = 1024
"""Tokens of one layer that are turned together: what is computed in fp32 needs memory, and stays in the cache."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotation of pairs of a key's elements.

    Attributes:
        inv_freq: Angle per position of each pair, fp64 on the CPU.
        first: Index of the first element that is turned.
        is_interleaved: Whether neighbours are a pair; else element i of the first half and i of the second.
    """

    inv_freq: Tensor
    first: int
    is_interleaved: bool

    def apply(self, elements: Tensor, shift: int) -> None:
        """Turn `elements` `[..., D]` by `shift` positions, in place: in fp32 at least, rounded once."""
        wide = torch.promote_types(elements.dtype, torch.float32)
        angles = self.inv_freq * shift
        cos, sin = (part.to(device=elements.device, dtype=wide) for part in (angles.cos(), angles.sin()))
        targets = self._pair(elements)
        one, other = (part.to(wide) for part in targets)
        turned = (one * cos - other * sin, other * cos + one * sin)
        for target, values in zip(targets, turned, strict=True):
            target.copy_(values)

    def _pair(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the first and of the second elements of all pairs."""
        half, first = len(self.inv_freq), self.first
        if self.is_interleaved:
            part = elements[..., first : first + 2 * half]
            return part[..., 0::2], part[..., 1::2]
        return elements[..., first : first + half], elements[..., first + half : first + 2 * half]


class KeyRotation:
    """What moving tokens does to each stored row of a model's KV."""

    def __init__(self, turns: Sequence[Sequence[Turn | None]]) -> None:
        """Hold one turn for each row of each section; None where KV does not depend on the position."""
        self.turns = tuple(tuple(rows) for rows in turns)

    @classmethod
    def of(cls, model: PreTrainedModel, spec: KVSpec) -> "KeyRotation":
        """Find how the model's keys move, and prove it on the model. Feeds it about 100 tokens.

        Raises:
            UnsupportedModelError: The model's KV cannot be moved, or that could not be proven; says why.
        """
        _refuse_by_structure(model, spec)
        prober = _Prober(model, spec)
        here = prober.kv_at(0)
        there = [(shift, prober.kv_at(shift)) for shift in _shifts(model)]
        turns = [
            [
                _turn(
                    model,
                    layer,
                    rows[row],
                    [(shift, kv[index][row]) for shift, kv in there],
                    is_first=layer == prober.first_layer,
                )
                for row, layer in enumerate(prober.layers[index])
            ]
            for index, rows in enumerate(here)
        ]
        _check_positions_are_slots(model, prober, turns, here)
        return cls(turns)

    def rotate(self, sections: Sequence[Tensor], shift: int) -> None:
        """Make the KV in `sections` what it would be `shift` positions later (earlier: below 0), in place.

        Args:
            sections: One `[L, H, T, D]` per section, as the model wrote it: turning what was turned before adds up
                rounding errors.
            shift: Positions.
        """
        for rows, section in zip(self.turns, sections, strict=True):
            for row, turn in zip(section.unbind(), rows, strict=True):
                if turn is not None and shift:
                    for part in row.split(TOKENS_AT_ONCE, dim=1):
                        turn.apply(part, shift)


class _Prober:
    """Feeds the model the same few tokens at different positions.

    Attributes:
        layers: For each section and row, the index of the layer that writes it.
        first_layer: The first layer that writes KV: it has seen no other token.
    """

    def __init__(self, model: PreTrainedModel, spec: KVSpec) -> None:
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise _refusal(model, "it takes no position_ids, so that how its KV depends on them cannot be tried")
        self._model = model
        self._places = _places(spec)
        self.layers = [[layer for layer, _ in rows] for rows in self._places]
        self.first_layer = min(layer for layers in self.layers for layer in layers)
        generator = torch.Generator().manual_seed(0)
        vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self._tokens = torch.randint(vocab_size, (1, 2 * NUM_PROBE_TOKENS), generator=generator)

    def kv_at(self, position: int) -> list[list[Tensor]]:
        """Return what each row of each section holds, `[H, T, D]` in fp64, of the probe at `position`."""
        positions = torch.arange(position, position + NUM_PROBE_TOKENS, device=self._model.device)
        return self._feed(self._tokens[:, NUM_PROBE_TOKENS:], position_ids=positions[None])

    def kv_after_others(self) -> list[list[Tensor]]:
        """Return the same of the probe after as many other tokens, with the positions that the model itself gives."""
        return [[row[:, -NUM_PROBE_TOKENS:] for row in rows] for rows in self._feed(self._tokens)]

    def _feed(self, tokens: Tensor, **options: object) -> list[list[Tensor]]:
        model = self._model
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        options[cache_argument(model)] = cache
        try:
            with torch.no_grad(), unchanged(model):
                model(input_ids=tokens.to(model.device), use_cache=True, **options)
        except (TypeError, ValueError, IndexError) as error:
            raise _refusal(model, f"it could not be fed a few tokens at other positions ({error})") from error
        return [[_read(cache.layers[layer], name) for layer, name in rows] for rows in self._places]


def _places(spec: KVSpec) -> list[list[tuple[int, str]]]:
    """Return, for each section and row, the index of the layer that writes it and under which name."""
    places = {
        (2 * group + index, row): (layer_index, name)
        for layer_index, layer in enumerate(spec.layers)
        for group, row, names in (
            (layer.group, layer.row, ("keys", "values")),
            (layer.indexer_group, layer.indexer_row, ("indexer_keys", "")),
        )
        if group is not None
        for index, name in enumerate(names)
    }
    return [
        [places[2 * group + index, row] for row in range(spec.groups[group].num_layers)]
        for group in range(len(spec.groups))
        for index in (0, 1)
    ]


def _read(layer: object, name: str) -> Tensor:
    """Return what a layer of a stock cache holds, `[H, T, D]`."""
    if not name:
        return torch.empty(1, NUM_PROBE_TOKENS, 0, dtype=torch.float64)
    tensor: Tensor = getattr(layer, name)
    return tensor.reshape(-1, *tensor.shape[-2:]).to("cpu", torch.float64)


def _shifts(model: PreTrainedModel) -> list[int]:
    """Return how far to move the probe, within the positions that the model knows."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    shifts = {min(shift, limit - 2 * NUM_PROBE_TOKENS) if isinstance(limit, int) else shift for shift in SHIFTS}
    if min(shifts) < 1:
        raise _refusal(model, f"it knows {limit} positions, too few to move anything by")
    return sorted(shifts)


def _turn(
    model: PreTrainedModel, layer: int, here: Tensor, there: Sequence[tuple[int, Tensor]], *, is_first: bool
) -> Turn | None:
    """Return the turn that takes `here` to what was found `there`, at every shift."""
    candidates: list[Turn | None] = [None, *_candidates(model, here.shape[-1])]
    errors = [max(_error(turn, here, shift, found) for shift, found in there) for turn in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    tolerance = _tolerance(model, is_first=is_first)
    if not errors[best] <= tolerance:  # written so that NaN is refused
        raise _refusal(
            model,
            f"what layer {layer} writes at other positions is not what it writes at 0, turned: of {len(errors)} "
            f"layouts the nearest is {errors[best]:.2g} off, {tolerance:g} is allowed. Its positions are not relative, "
            f"or it turns keys in a way that agentmem does not know",
        )
    return candidates[best]


def _candidates(model: PreTrainedModel, dim: int) -> Iterator[Turn]:
    """Yield the ways in which the model's rotary modules could turn vectors of `dim` elements."""
    for inv_freq in _frequencies(model):
        num_turned = 2 * len(inv_freq)
        for first in sorted({0, dim - num_turned}) if num_turned <= dim else ():
            for angles in (inv_freq, -inv_freq):  # NanoChat turns the other way
                yield Turn(angles, first, is_interleaved=False)
                yield Turn(angles, first, is_interleaved=True)


def _frequencies(model: PreTrainedModel) -> list[Tensor]:
    """Return the different frequency vectors that the model's modules hold; some have one for each layer type."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and buffer.ndim == 1:
            inv_freq = buffer.detach().to("cpu", torch.float64)
            if not any(torch.equal(inv_freq, other) for other in found):
                found.append(inv_freq)
    return found


def _error(turn: Turn | None, here: Tensor, shift: int, found: Tensor) -> float:
    """Return how far a turn is off: the worst element of any head, by its median over tokens, against its size.

    The median, because a router of experts may send single tokens elsewhere on a rounding error.
    """
    if not here.numel():
        return 0.0
    length = min(here.shape[1], found.shape[1])  # layers with a small window have dropped the first tokens
    here, found = here[:, -length:], found[:, -length:]
    wanted = here.clone()
    if turn is not None:
        turn.apply(wanted, shift)
    overall = here.square().mean().sqrt()
    size = ((here.square() + found.square()) / 2).mean(1).sqrt() + 0.1 * overall
    return float(((wanted - found).abs().median(1).values / size.clamp_min(1e-12)).max())


def _check_positions_are_slots(
    model: PreTrainedModel, prober: _Prober, turns: Sequence[Sequence[Turn | None]], here: list[list[Tensor]]
) -> None:
    """Refuse a model that ignores position_ids, for it would look like one whose KV has no positions.

    The first layer that writes KV has seen no other token: after others, with the positions that the model itself
    gives, its KV must be turned by as many positions.
    """
    found = prober.kv_after_others()
    errors = [
        _error(turns[index][row], here[index][row], NUM_PROBE_TOKENS, found[index][row])
        for index, layers in enumerate(prober.layers)
        for row, layer in enumerate(layers)
        if layer == prober.first_layer
    ]
    if not max(errors) <= _tolerance(model, is_first=True):
        raise _refusal(model, "the positions that it gives its tokens are not those that position_ids stand for")


def _refuse_by_structure(model: PreTrainedModel, spec: KVSpec) -> None:
    """Refuse what no proof over a few tokens would show."""
    kinds = {layer.kind for layer in spec.layers}
    if model.config.is_encoder_decoder:
        raise _refusal(model, "the KV of an encoder-decoder model belongs to its encoder's input")
    if spec.states or LayerKind.RECURRENT in kinds:
        raise _refusal(model, "it has recurrent layers, whose state runs through every token and cannot be cut")
    if LayerKind.CHUNKED in kinds:
        raise _refusal(model, "its chunked attention lets the position decide which tokens see one another")
    for module in model.modules():
        if hasattr(module, "rope_deltas") or hasattr(module, "mrope_section"):
            raise _refusal(model, "its positions have several parts (M-RoPE) and differ from the tokens' places")
        for scheme in _schemes(module):
            if "dynamic" in scheme or "longrope" in scheme:
                raise _refusal(model, f"its {scheme!r} rotary frequencies depend on the length of the sequence")


def _schemes(module: torch.nn.Module) -> list[str]:
    """Return the rotary schemes of a rotary module, one for each layer type that it serves."""
    scheme = getattr(module, "rope_type", None)
    values = scheme.values() if isinstance(scheme, dict) else [scheme]
    return [value for value in values if isinstance(value, str)]


def _tolerance(model: PreTrainedModel, *, is_first: bool) -> float:
    if model.dtype not in {torch.float16, torch.bfloat16}:
        return TOLERANCE_32
    return TOLERANCE_16_FIRST if is_first else TOLERANCE_16


def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the KV of {type(model).__name__} cannot be moved to other positions: {why}. Use edit(..., mode='exact'), "
        f"which computes again what follows the edit"
    )
