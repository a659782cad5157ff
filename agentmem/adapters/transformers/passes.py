"""The forward passes of a model over branches.

Hooks on the model see every pass that is given a branch's cache, whoever runs it: they check its inputs, learn the
token ids, add what the branch knows beside them (positions, media, the encoder's output) and, when all layers have
written, advance the branch. A pass that fails leaves the branch as it was, and every pass leaves the model as it was.
"""

import contextlib
import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentmem.adapter import Feed
from agentmem.adapters.transformers.batch_model import TransformersBatch
from agentmem.adapters.transformers.batch_probe import Probe
from agentmem.adapters.transformers.cache import BranchCache
from agentmem.adapters.transformers.causality import check_causal, is_causal
from agentmem.adapters.transformers.continuation import needs_single_steps, plain_tokens
from agentmem.adapters.transformers.encoder import IDS, MASK, BranchPairCache, Encoder
from agentmem.adapters.transformers.geometry import cache_argument
from agentmem.adapters.transformers.inputs import check_plain, check_positions, read_tokens
from agentmem.adapters.transformers.media import MediaInputs, media
from agentmem.adapters.transformers.positions import MultiAxisPositions, delta_holder
from agentmem.adapters.transformers.regimes import RotaryRegimes, settled
from agentmem.batching import RowsPass, RowText
from agentmem.errors import InvalidInputError, UnsupportedModelError
from agentmem.kv.spec import KVSpec
from agentmem.marks import Marks

CACHE_NAMES = ("cache", "past_key_values")
"""Under which names a model may be given its cache."""

_NUM_PROBE_TOKENS = 64
"""Tokens that a probe may choose from."""

Cache = BranchCache | BranchPairCache


class Passes:
    """Runs one model over branches.

    Attributes:
        media: What the model takes beside tokens; of no use for one with an encoder.
        encoder: The encoder's side of the model; None for a decoder-only one.
        regimes: Its rotary modules whose frequencies depend on the length.
        is_stepwise: Whether it must be fed one token at a time once it has layer states.
    """

    def __init__(self, model: PreTrainedModel, spec: KVSpec) -> None:
        """Put hooks on the model, until `close`.

        Raises:
            UnsupportedModelError: Its KV depends on something that can't be kept with a branch.
        """
        holder = delta_holder(model)
        self._model = model
        self._spec = spec
        self._cache_argument = cache_argument(model)
        self._takes = inspect.signature(model.forward).parameters.keys()
        self.is_stepwise = needs_single_steps(model, spec)
        self.encoder = Encoder(model) if model.config.is_encoder_decoder else None
        self.media = MediaInputs(model, needs_token_types=holder is not None)
        self._axes = None if holder is None else MultiAxisPositions(model, holder, plain_tokens(model, 3))
        self._counts_itself = self.encoder is None and not self._goes_by_positions()
        self._running: weakref.WeakValueDictionary[int, BranchCache] = weakref.WeakValueDictionary()
        self._generating: dict[int, BranchCache] = {}
        self._batching: dict[int, bytes] = {}
        self._batch: TransformersBatch | None = None
        self.regimes = RotaryRegimes(model, self._running_regime)
        if self.regimes.is_needed and (self._axes is not None or self.encoder is not None):
            self.regimes.close()
            raise UnsupportedModelError(
                f"{type(model).__name__} has rotary frequencies that depend on the length, and beside them an encoder "
                f"or positions of several axes: agentmem knows the one without the others"
            )
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Leave the model as it was found."""
        self.regimes.close()
        for hook in self._hooks:
            hook.remove()

    def cache(self, feed: Feed) -> Cache:
        """Return the cache that stands for a branch."""
        return BranchCache(feed, self) if self.encoder is None else self.encoder.cache(feed, self)

    def run(self, feed: Feed, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Feed `tokens`, in as many passes as the model needs; return the logits `[num_logits, V]` of the last ones."""
        stops = self._stops(feed, len(tokens))
        kept: list[Tensor] = []
        for first, stop in zip([0, *stops], stops, strict=False):
            wanted = min(stop - first, num_logits - (len(tokens) - stop))
            logits = self._run(feed, tokens[first:stop], max(wanted, 1))
            kept.extend([logits] if wanted > 0 else [])
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    def generate(self, feed: Feed, tokens: Sequence[int], settings: Mapping[str, object]) -> list[int]:
        """Continue `tokens` with transformers' generation; return the new ids."""
        if self.is_stepwise and 0 < feed.position < len(tokens) - 1:
            self.run(feed, tokens[feed.position : -1], 1)
        cache = self.cache(feed)
        given = {**settings, self._cache_argument: cache}
        with self._in_generation(_branch_of(cache)):
            output = self._generate(feed, tokens, given)
        return [int(token) for token in output[0, len(tokens) :]]

    def batch(self) -> TransformersBatch:
        """Return how the model feeds several branches at once, proven on it when it is first asked for."""
        if self._batch is None:
            with settled(self._model):
                probe = Probe(self._model, self._spec, self._row_positions, self._plain_text(), self.regimes.regime(1))
                self._batch = TransformersBatch(
                    self._model,
                    self._spec,
                    self._row_positions,
                    self._in_regime,
                    probe,
                    is_stepwise=self.is_stepwise,
                )
        return self._batch

    # -- inside

    def _plain_text(self) -> list[int]:
        """Return different tokens that stand for no media, from all over the vocabulary: low ids often have no text."""
        weight = self._model.get_input_embeddings().weight
        size = int(weight.shape[0]) if isinstance(weight, Tensor) else _NUM_PROBE_TOKENS
        step = max(size // _NUM_PROBE_TOKENS, 1)
        return [token for token in range(step // 2, size, step) if token not in self.media.placeholders]

    @contextlib.contextmanager
    def _in_regime(self, regime: bytes) -> Iterator[None]:
        """Hold the rotary modules to a regime while rows are fed in this thread."""
        thread = threading.get_ident()
        self._batching[thread] = regime
        try:
            yield
        finally:
            del self._batching[thread]

    def _row_positions(self, rows: RowsPass) -> Tensor | None:
        """Return the positions of several rows' tokens; what fills shorter rows up has those of their last token."""
        num_queries = rows.num_fed
        if self._text_positions(0, 1) is None:
            return None
        found = []
        for text, tokens, length in zip(rows.texts, rows.tokens, rows.lengths, strict=True):
            ids = tokens or [0]  # of a row that only comes along
            own = self._positions_of_row(text, ids, length)
            found.append(torch.cat([own, own[..., -1:].expand(*own.shape[:-1], num_queries - len(ids))], dim=-1))
        return torch.cat(found, dim=-2)

    def _positions_of_row(self, text: RowText, tokens: Sequence[int], length: int) -> Tensor:
        stop = length + len(tokens)
        marks = media(text.marks, stop)
        if self._axes is None or not marks:
            positions = self._text_positions(length, stop)
            return torch.empty(1, 0) if positions is None else positions
        return self._axes.of(length, tokens, marks, _Known(text, self.media))

    def _run(self, feed: Feed, tokens: Sequence[int], num_logits: int) -> Tensor:
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._model.device)
        options: dict[str, object] = {self._cache_argument: self.cache(feed), "use_cache": True}
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = num_logits
        with torch.no_grad():
            logits: Tensor = self._model(**{self._ids_name: ids}, **options).logits[0]
        return logits[-num_logits:]

    def _generate(self, feed: Feed, tokens: Sequence[int], settings: dict[str, object]) -> Tensor:
        if self.encoder is not None:
            return self.encoder.generate(tokens, settings)
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._model.device)
        settings["attention_mask"] = torch.ones_like(ids)
        if self._axes is not None:  # else transformers would leave this branch's delta on the model
            marks = media(feed.marks, len(tokens))
            settings["position_ids"] = self._axes.of(0, tokens, marks, _Known(feed, self.media))
        output: Tensor = self._model.generate(ids, **settings)  # type: ignore[operator]  # mixin method, seen as a module
        return output

    def _stops(self, feed: Feed, num_tokens: int) -> list[int]:
        """Return where to end the passes over the next tokens, counted from the first of them."""
        start = feed.position
        if self.is_stepwise and start > 0:
            return list(range(1, num_tokens + 1))
        return [stop - start for stop in self.media.stops(feed.marks, start, start + num_tokens)]

    @property
    def _ids_name(self) -> str:
        return "input_ids" if self.encoder is None else IDS

    @contextlib.contextmanager
    def _in_generation(self, cache: BranchCache) -> Iterator[None]:
        thread = threading.get_ident()
        before = self._generating.get(thread)
        self._generating[thread] = cache
        try:
            yield
        finally:
            del self._generating[thread]
            if before is not None:
                self._generating[thread] = before

    def _running_regime(self) -> bytes | None:
        """Return the rotary regime of our pass that runs in this thread; None when there is none."""
        thread = threading.get_ident()
        cache = self._running.get(thread)
        return self._batching.get(thread) if cache is None else cache.feed.regime

    # -- hooks

    def _before(
        self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        thread = threading.get_ident()
        self._running.pop(thread, None)  # a pass that was interrupted leaves it, until its cache is gone
        kwargs = self._with_cache(kwargs)
        cache = self._own_cache(args, kwargs)
        if cache is None:
            return None
        branch = _branch_of(cache)
        tokens = read_tokens(self._ids_name, args if self.encoder is None else (), kwargs)
        added = self._begin_decoder(branch, tokens, kwargs) if isinstance(cache, BranchCache) else {}
        if isinstance(cache, BranchPairCache) and self.encoder is not None:
            check_plain(kwargs, cache.branch.position, len(tokens), MASK)
            added = {MASK: None, **self.encoder.begin(cache, tokens, kwargs)}
        self._running[thread] = branch
        return args, {**kwargs, **added}

    def _after(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        """Advance the branch; also called, with no output, when the pass failed."""
        cache = self._own_cache(args, kwargs)
        is_running = self._running.pop(threading.get_ident(), None) is not None
        if cache is None or not is_running:
            return
        if output is None:
            _branch_of(cache).abort()
        elif isinstance(cache, BranchPairCache) and self.encoder is not None:
            self.encoder.commit(cache)
        else:
            _branch_of(cache).commit()

    def _begin_decoder(
        self, cache: BranchCache, tokens: Sequence[int], kwargs: Mapping[str, object]
    ) -> dict[str, object]:
        """Check a decoder-only model's pass and begin it; return what the model is given beside the tokens."""
        feed, start, stop = cache.feed, cache.position, cache.position + len(tokens)
        if self.is_stepwise and start and len(tokens) > 1:
            raise InvalidInputError(
                f"{type(self._model).__name__} forgets its state when it is fed several tokens on top of it; found "
                f"{len(tokens)} at position {start:,}: feed them one at a time"
            )
        unused = check_plain(kwargs, start, len(tokens), "attention_mask")
        for name in unused:
            self.media.check_neutral(name)
        self.media.check_pass(feed.marks, start, tokens)
        self.regimes.regime(stop)
        added: dict[str, object] = dict.fromkeys(unused)
        positions = self._positions(feed, start, tokens, kwargs)
        if positions is not None:
            added["position_ids"] = positions
        added |= self.media.of(feed, start, stop)
        cache.begin(tokens)
        return added

    def _goes_by_positions(self) -> bool:
        """Tell whether the model takes a token's index for its position; else it must count by itself.

        Raises:
            UnsupportedModelError: Its KV does not depend on the tokens before it alone.
        """
        self._counts_itself = False
        if self._axes is None and not is_causal(self._model, self._text_positions):
            check_causal(self._model, lambda _start, _stop: None)
            return False
        if self._axes is not None:
            check_causal(self._model, self._text_positions)
        return True

    def _text_positions(self, start: int, stop: int) -> Tensor | None:
        """Return the positions of text that has no media before it; None for a model that takes none.

        Given if they can be: some models count from 0 in each pass when they are not.
        """
        if self._axes is not None:
            return self._axes.of_text(start, stop)
        if "position_ids" not in self._takes or self._counts_itself:
            return None
        return torch.arange(start, stop, device=self._model.device)[None]

    def _positions(self, feed: Feed, start: int, tokens: Sequence[int], kwargs: Mapping[str, object]) -> Tensor | None:
        """Return the positions of a pass, having checked those that the user gave."""
        marks = media(feed.marks, start + len(tokens))
        if self._axes is None or not marks:
            positions = self._text_positions(start, start + len(tokens))
        else:
            positions = self._axes.of(start, tokens, marks, _Known(feed, self.media))
        if positions is not None and threading.get_ident() not in self._generating:
            check_positions(kwargs.get("position_ids"), positions, start)
        return positions

    def _with_cache(self, kwargs: dict[str, object]) -> dict[str, object]:
        """Put our cache back when a model has thrown it away in the middle of a generation.

        Some models with two rotary regimes do, to compute all tokens again at the border: the branch does that itself.
        """
        cache = self._generating.get(threading.get_ident())
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if cache is None or not self.regimes.has_border or not isinstance(ids, Tensor) or self._own_cache((), kwargs):
            return kwargs
        start = cache.position
        if ids.shape[0] != 1 or ids.shape[1] <= start or ids[0, :start].tolist() != cache.feed.tokens(start):
            return kwargs  # another sequence, which a logits processor computes
        rest = {"position_ids": positions[..., start:]} if isinstance(positions, Tensor) else {}
        return {**kwargs, "input_ids": ids[:, start:], self._cache_argument: cache, **rest}

    def _own_cache(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Cache | None:
        """Return the cache that a pass was given, if it comes from here: a model may serve several stores."""
        for value in (*(kwargs.get(name) for name in CACHE_NAMES), *args):
            if isinstance(value, BranchCache | BranchPairCache) and _branch_of(value).owner is self:
                return value
        return None


class _Known:
    """What a feed knows of its sequence (see `positions.Known`)."""

    def __init__(self, feed: RowText, inputs: MediaInputs) -> None:
        self._feed = feed
        self._inputs = inputs

    def tokens(self, stop: int) -> list[int]:
        """Return the first `stop` tokens."""
        return self._feed.tokens(stop)

    def positional(self, marks: Marks, num_tokens: int) -> Mapping[str, object]:
        """Return the inputs that positions may depend on."""
        return self._inputs.positional(self._feed, marks, num_tokens)


def _branch_of(cache: Cache) -> BranchCache:
    return cache if isinstance(cache, BranchCache) else cache.branch
