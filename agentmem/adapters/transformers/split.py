"""Our attention in the place of a model's, for as long as a pass over several branches runs.

Other passes of the model, in other threads, run as ever meanwhile: what is put in their way calls what was there.
"""

import contextlib
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from agentmem.adapters.transformers.batch_cache import HANDOFF, Handoff, RowsCache
from agentmem.adapters.transformers.cascade import attend
from agentmem.adapters.transformers.fingerprint import BATCH_MARK
from agentmem.errors import UnsupportedModelError

_UNUSED = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "sliding_window"})
"""Arguments of an attention that say nothing beside what the cache says."""

_NAME = "_attn_implementation_internal"
"""Where a configuration keeps the name of its attention."""

Attended = tuple[Tensor, Tensor | None]


class SplitAttention:
    """The attention of one model, which can be replaced for the time of a pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Look for the configurations that the model's layers read their attention from."""
        found = [model.config, *(getattr(module, "config", None) for module in model.modules())]
        self._configs = list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())
        self._lock = threading.Lock()
        self._running: tuple[int, RowsCache] | None = None

    @contextlib.contextmanager
    def running(self, cache: RowsCache) -> Iterator[None]:
        """Let this thread's passes read the rows of `cache`."""
        with self._lock:
            before = [(config, config._attn_implementation) for config in self._configs]  # noqa: SLF001 - set_attn_implementation logs, and checks every module
            names = {name: f"{name}{BATCH_MARK}{id(self)}" for _, name in before if name is not None}
            for name, ours in names.items():
                AttentionInterface.register(ours, partial(self._attend, name))
                AttentionMaskInterface.register(ours, partial(self._mask, name))
            homes, originals = [vars(config) for config, _ in before], [name for _, name in before]
            try:
                self._running = threading.get_ident(), cache
                for config, name in before:
                    _set(config, names.get(name))
                yield
            finally:
                self._running = None
                # In one step, which no interrupt divides: a model that was left half ours would be of no use.
                list(map(operator.setitem, homes, itertools.repeat(_NAME), originals))
                for ours in names.values():
                    AttentionInterface._global_mapping.pop(ours, None)  # noqa: SLF001 - there is no unregister
                    AttentionMaskInterface._global_mapping.pop(ours, None)  # noqa: SLF001 - as above

    def _cache(self) -> RowsCache | None:
        running = self._running
        return running[1] if running is not None and running[0] == threading.get_ident() else None

    def _mask(self, name: str, *args: object, **kwargs: object) -> Tensor | None:
        """Make the mask that a model asks for: ours in our passes."""
        cache = self._cache()
        if cache is None:
            made: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **kwargs)
            return made
        mask = None if cache.view.is_split else cache.mask_asked_for()
        if mask is None or name != "eager":
            return mask
        dtype = kwargs.get("dtype")
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill_(~mask, torch.finfo(dtype).min)

    def _attend(
        self,
        name: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: object,
    ) -> Attended:
        """Attend as the model does, or, where `update` handed rows over, to these."""
        handoff = kwargs.pop(HANDOFF, None)
        if isinstance(handoff, Handoff):
            return _attend_rows(handoff, query, key, value, attention_mask, kwargs), None
        cache = self._cache()
        if cache is not None and cache.view.is_split:
            raise UnsupportedModelError("an attention layer was called without what its branches share")
        attended: Attended = _original(name, module)(module, query, key, value, attention_mask, **kwargs)
        return attended


def _attend_rows(
    handoff: Handoff,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, object],
) -> Tensor:
    """Return `[N, q, Hq, Dv]`, as transformers' attention functions do."""
    rows = handoff.rows
    if key is not rows.keys or value is not rows.values:
        raise UnsupportedModelError("its layers change keys and values between cache and attention")
    if attention_mask is not None:
        raise UnsupportedModelError("its layers make attention masks of their own")
    scale, sinks = options.pop("scaling", None), options.pop("s_aux", None)
    for name, option in options.items():
        if option is not None and option is not False and name not in _UNUSED and not _is_neutral(name, option):
            raise UnsupportedModelError(f"its attention takes {name}, which parts of it can't be merged with")
    handoff.layer.num_attended += 1
    result = attend(
        query,
        rows,
        scale=scale if isinstance(scale, float) else None,
        sinks=sinks if isinstance(sinks, Tensor) else None,
    )
    return result.transpose(1, 2).contiguous()


def _is_neutral(name: str, option: object) -> bool:
    """Say whether an argument asks for nothing."""
    return (name == "dropout" and option == 0.0) or (name == "is_causal" and option is True)


def _original(name: str, module: nn.Module) -> Callable[..., Attended]:
    """Return the attention function that stands behind a name; "eager" is each model's own."""
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]  # a mapping of functions
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no attention function of its own to go back to")
    return found  # type: ignore[no-any-return]  # a function of the model's module


def _set(config: PreTrainedConfig, name: str | None) -> None:
    # The property's setter hands the name down to configurations inside, which are set one by one here.
    setattr(config, _NAME, name)
