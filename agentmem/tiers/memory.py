"""Memory for KV: every tensor that the device and host tiers hold is allocated here."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGES_FROM_NBYTES = 4 << 20
"""Sections of this size lie on huge pages on a CPU: touching them first costs a quarter (benchmarks/path.py)."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory, on huge pages where that pays and the system has them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGES_FROM_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages: small ones do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def empty_in_ram(shape: Sequence[int], dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
    """Return uninitialised memory of the host, page-locked for copies to and from a GPU if asked for."""
    return torch.empty(shape, dtype=dtype, pin_memory=is_pinned)


def copy_tokens(sources: Sequence[Tensor], targets: Sequence[Tensor], num_tokens: int) -> None:
    """Copy the first tokens of sections `[L, H, T, D]`."""
    for source, target in zip(sources, targets, strict=True):
        target[:, :, :num_tokens].copy_(source[:, :, :num_tokens])
