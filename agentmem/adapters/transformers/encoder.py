"""Encoder-decoder models: the branch is the decoder's, the encoder runs once for its inputs.

What the decoder reads of the encoder is the KV of its cross-attention. It is computed in the first pass, kept with the
branch's root, and shared by all branches with the same inputs.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from agentmem.adapter import Feed
from agentmem.adapters.transformers.cache import BranchCache
from agentmem.adapters.transformers.geometry import unchanged
from agentmem.adapters.transformers.media import Inputs, check_taken, taken_inputs
from agentmem.errors import InvalidInputError, SpecMismatchError, UnsupportedModelError
from agentmem.marks import MarkKind

IDS, MASK = "decoder_input_ids", "decoder_attention_mask"
"""Under which names such a model takes the branch's tokens."""

_NUM_PROBED = 3
"""Length of the encoder's output in probes."""


class StandIn(BaseModelOutput):
    """Takes the place of the encoder's output, of which only the shape is read."""


class BranchPairCache(EncoderDecoderCache):
    """A branch's cache together with the cross-attention KV of its encoder's inputs. As good as a `BranchCache`.

    Attributes:
        branch: The branch's own cache.
        is_new: Whether the cross-attention KV is computed in the running pass.
    """

    def __init__(self, branch: BranchCache) -> None:
        """Stand for the branch; the cross-attention KV comes with each pass."""
        super().__init__(branch, DynamicCache())
        self.branch = branch
        self.is_new = True

    def fill(self, root: Sequence[Tensor], layers: Sequence[int]) -> None:
        """Give the decoder the cross-attention KV `[keys, values, keys, ...]` of `layers`; the tensors are shared."""
        self.forget()
        filled = [DynamicLayer() for _ in range(max(layers) + 1)]
        for layer, keys, values in zip(layers, root[::2], root[1::2], strict=True):
            filled[layer].lazy_initialization(keys, values)
            filled[layer].keys, filled[layer].values = keys, values
            self.is_updated[layer] = True
        self.cross_attention_cache.layers = list(filled)
        self.is_new = False

    def forget(self) -> None:
        """Let the decoder compute the cross-attention KV in the next pass."""
        self.cross_attention_cache = DynamicCache()
        self.is_updated = {}
        self.is_new = True

    def computed(self, layers: Sequence[int]) -> list[Tensor]:
        """Return the cross-attention KV that the last pass computed, `[keys, values, keys, ...]`.

        Raises:
            SpecMismatchError: Other layers wrote than when the store was opened.
        """
        if _filled(self.cross_attention_cache) != list(layers):
            raise SpecMismatchError(
                f"cross-attention wrote in the layers {_filled(self.cross_attention_cache)} in this pass, and in "
                f"{list(layers)} when the store was opened; the branch is unchanged"
            )
        return _tensors(self.cross_attention_cache)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse: it would copy all KV."""
        self.branch.__deepcopy__(memo)


class Encoder:
    """The encoder's side of one encoder-decoder model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Learn which layers read the encoder, and prove that they read only what a branch keeps.

        Raises:
            UnsupportedModelError: The decoder reads the encoder's output beside the KV it keeps of it.
        """
        self._model = model
        self._taken = taken_inputs(model, "input_ids", "inputs_embeds")
        self._width = _width(model)
        self._start = f"the model's decoder_start_token_id is {getattr(model.config, 'decoder_start_token_id', None)}"
        with unchanged(model):
            self._layers = _prove(model, self._width)

    def check(self, tokens: Sequence[int], inputs: Inputs, position: int) -> None:
        """Refuse inputs that the encoder does not take, or not there.

        Raises:
            InvalidInputError: They come after the first token or without one, hide something, or the model has no such
                inputs.
        """
        if inputs and not tokens:
            raise InvalidInputError(
                f"the encoder's inputs ({', '.join(sorted(inputs))}) need the decoder's first tokens: {self._start}"
            )
        if inputs and position:
            raise InvalidInputError(
                f"the encoder's inputs ({', '.join(sorted(inputs))}) belong to a whole branch and come with its first "
                f"tokens; this one has {position:,}. Start another branch for them"
            )
        check_taken(inputs, self._taken, self._model)

    def cache(self, feed: Feed, owner: object) -> BranchPairCache:
        """Return the cache of a branch."""
        return BranchPairCache(BranchCache(feed, owner))

    def begin(self, cache: BranchPairCache, tokens: Sequence[int], given: Mapping[str, object]) -> dict[str, object]:
        """Begin a pass; return what the model is given for it: the encoder's inputs once, then only a stand-in.

        Raises:
            InvalidInputError: The branch has no inputs for the encoder, or the pass brings its own.
        """
        feed = cache.branch.feed
        marks = [mark for mark in feed.marks if mark.kind is MarkKind.ENCODER]
        if not marks:
            raise InvalidInputError(
                f"the branch has no inputs for the encoder of {type(self._model).__name__}: append them to an empty "
                f"branch, with the decoder's first tokens: {self._start}"
            )
        brought = sorted(name for name in (self._taken | {"encoder_outputs"}) & given.keys() if given[name] is not None)
        if brought and not isinstance(given.get("encoder_outputs"), StandIn):
            raise InvalidInputError(
                f"{', '.join(brought)} can't be given here: the encoder's inputs are the branch's, and its output is "
                f"kept; leave them out"
            )
        root = cache.branch.begin(tokens).root
        if root is not None:
            cache.fill(root, self._layers)
            return {"encoder_outputs": self.stand_in(root[0].shape[2])}
        cache.forget()
        inputs = {name: value for name, value in feed.inputs(marks[0]).items() if name != "attention_mask"}
        placed = {n: v.to(self._model.device) if isinstance(v, Tensor) else v for n, v in inputs.items()}
        return {"encoder_outputs": None, **placed}

    def commit(self, cache: BranchPairCache) -> None:
        """Keep the cross-attention KV, if this pass computed it, and make the pass's tokens part of the branch."""
        if cache.is_new:
            cache.branch.feed.keep_root(cache.computed(self._layers))
        cache.branch.commit()

    def stand_in(self, num_tokens: int = 1) -> StandIn:
        """Return an encoder's output of `num_tokens` tokens that takes no memory: `[1, tokens, width]` of zeros."""
        zero = torch.zeros((1, 1, 1), dtype=self._model.dtype, device=self._model.device)
        return StandIn(last_hidden_state=zero.expand(1, num_tokens, self._width))

    def generate(self, tokens: Sequence[int], settings: dict[str, object]) -> Tensor:
        """Run transformers' generation on a branch's cache, without the encoder; return `[1, tokens]`.

        It is the plain one also for models with their own, such as Whisper's for long recordings: that one cuts the
        input into windows and chooses the first tokens, which here are the user's.
        """
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._model.device)
        settings |= {IDS: ids, MASK: torch.ones_like(ids), "encoder_outputs": self.stand_in()}
        # The first token is the user's choice: with any other value transformers would put its own before it.
        settings["decoder_start_token_id"] = tokens[0]
        output: Tensor = GenerationMixin.generate(self._model, **settings)
        return output


def probe_encoder_decoder(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    """Feed a decoder `num_tokens` tokens and a made-up encoder's output; return the cache of its self-attention.

    The model makes the cache: only it knows how many layers its decoder has.

    Raises:
        UnsupportedModelError: It makes another kind of cache, or takes no encoder's output.
    """
    return _self_attention(model, _feed(model, _made_up(model, _width(model)), num_tokens, None)[0])


def _prove(model: PreTrainedModel, width: int) -> list[int]:
    """Return the layers with cross-attention, having seen that logits do not depend on the encoder's output later on.

    Raises:
        UnsupportedModelError: They do.
    """
    cache, _ = _feed(model, _made_up(model, width), 2, None)
    if not isinstance(cache, EncoderDecoderCache) or not isinstance(cache.cross_attention_cache, DynamicCache):
        raise _unknown(model, cache)
    others = [_made_up(model, width, scale) for scale in (0.0, 5.0)]
    logits = [_feed(model, other, 2, copy.deepcopy(cache))[1] for other in others]
    layers = _filled(cache.cross_attention_cache)
    if not layers or not torch.equal(*logits):
        raise UnsupportedModelError(
            f"{type(model).__name__} reads the encoder's output in every pass beside the KV that it keeps of it; "
            f"agentmem stores that KV only"
        )
    return layers


def _feed(model: PreTrainedModel, encoded: Tensor, num_tokens: int, cache: object) -> tuple[object, Tensor]:
    """Feed the decoder tokens; return its cache and the last token's logits."""
    ids = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    given = {} if cache is None else {"cache": cache}
    try:
        with torch.no_grad():
            output = model(
                **{IDS: ids}, encoder_outputs=BaseModelOutput(last_hidden_state=encoded), use_cache=True, **given
            )
    except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError) as error:  # it wants something else
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take an encoder's output of shape {list(encoded.shape)} ({error}); "
            f"agentmem cannot store its state yet"
        ) from error
    return getattr(output, "cache", None), output.logits[0, -1]


def _self_attention(model: PreTrainedModel, cache: object) -> DynamicCache:
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else None
    if not isinstance(own, DynamicCache):
        raise _unknown(model, cache)
    return own


def _unknown(model: PreTrainedModel, cache: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is an encoder-decoder model with a cache of type {type(cache).__name__}; agentmem "
        f"knows EncoderDecoderCache"
    )


def _made_up(model: PreTrainedModel, width: int, scale: float = 1.0) -> Tensor:
    values = torch.linspace(-scale, scale, _NUM_PROBED * width, dtype=torch.float32, device=model.device)
    return values.reshape(1, _NUM_PROBED, width).to(model.dtype)


def _width(model: PreTrainedModel) -> int:
    """Return the width of the encoder's output."""
    encoder = model.get_encoder()
    width = getattr(getattr(encoder, "config", None), "hidden_size", None)
    if not isinstance(width, int):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model whose encoder does not say how wide its output is "
            f"(config.hidden_size); agentmem cannot store its state yet"
        )
    return width


def _filled(cache: DynamicCache) -> list[int]:
    """Return the layers that something was written to."""
    return [index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]


def _tensors(cache: DynamicCache) -> list[Tensor]:
    """Return keys and values of those layers."""
    tensors = [getattr(cache.layers[index], name) for index in _filled(cache) for name in ("keys", "values")]
    return [tensor.detach() for tensor in tensors if isinstance(tensor, Tensor)]
