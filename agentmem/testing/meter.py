"""Measures what the tiers really hold, at every allocation and every commit: whether budgets are kept is no luck.

What a tier counts is not asked: memory is counted while a tensor of it lives, the data file by its pages.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from agentmem._lmdb import Environment
from agentmem.kv.spec import KVSpec
from agentmem.tiers import blockstore, device, host
from agentmem.tiers.states import LayerState, StateStore


class _Memory(bytearray):
    """Memory whose end can be noticed."""

    __slots__ = ("__weakref__",)


class Meter:
    """The most bytes that each tier held.

    Attributes:
        peaks: By what: "device" (KV and layer states), "host" (raw blocks), "scratch" (single blocks on their way to or
            from disk), "disk" (live bytes of the data file) and "file" (its size).
    """

    def __init__(self) -> None:
        """Measure nothing yet; see `measuring`."""
        self.peaks: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._states: weakref.WeakSet[LayerState] = weakref.WeakSet()

    def reset(self) -> None:
        """Forget the peaks so far; what is held now is counted on."""
        self.peaks.clear()

    @contextlib.contextmanager
    def measuring(self) -> Iterator["Meter"]:
        """Measure all stores that are opened inside."""
        with contextlib.ExitStack() as patched:
            for owner, name, value in (
                (device, "empty", self._empty_on_device),
                (host, "empty_in_ram", self._empty_in_ram),
                (blockstore, "empty_sections", self._empty_sections),
                (StateStore, "hold", self._holding(StateStore.hold)),
                (StateStore, "load", self._loading(StateStore.load)),
                (Environment, "_commit_group", self._committing(Environment._commit_group)),  # noqa: SLF001 - to watch
            ):
                patched.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield self

    # -- what takes the place of what

    def _empty_on_device(self, shape: Sequence[int], dtype: torch.dtype, _device: torch.device) -> Tensor:
        return self._allocate("device", shape, dtype)

    def _empty_in_ram(self, shape: Sequence[int], dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        if is_pinned:
            raise ValueError("memory is measured on CPUs")
        return self._allocate("host", shape, dtype)

    def _empty_sections(self, spec: KVSpec, num_tokens: int) -> list[Tensor]:
        dtype = getattr(torch, spec.dtype)
        return [self._allocate("scratch", shape, dtype) for shape in spec.section_shapes(num_tokens)]

    def _holding(self, hold: Callable[..., LayerState]) -> Callable[..., LayerState]:
        def measured(*arguments: object) -> LayerState:
            state = hold(*arguments)
            self._states.add(state)
            self._sample("device")
            return state

        return measured

    def _loading(self, load: Callable[..., object]) -> Callable[..., object]:
        def measured(store: StateStore, state: LayerState) -> object:
            loaded = load(store, state)
            self._states.add(state)
            self._sample("device")
            return loaded

        return measured

    def _committing(self, commit: Callable[..., object]) -> Callable[..., object]:
        def measured(environment: Environment, *arguments: object) -> object:
            outcomes = commit(environment, *arguments)
            self._note("disk", environment.live_nbytes)
            self._note("file", environment.nbytes)
            return outcomes

        return measured

    # -- counting

    def _allocate(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        memory = _Memory(nbytes)
        self._now[kind] += nbytes
        weakref.finalize(memory, self._free, kind, nbytes)
        self._sample(kind)
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def _free(self, kind: str, nbytes: int) -> None:
        self._now[kind] -= nbytes

    def _sample(self, kind: str) -> None:
        in_states = 0
        if kind == "device":
            tensors = [tensor for state in list(self._states) for tensor in state.tensors or ()]
            in_states = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        self._note(kind, self._now[kind] + in_states)

    def _note(self, kind: str, nbytes: int) -> None:
        self.peaks[kind] = max(self.peaks[kind], nbytes)
