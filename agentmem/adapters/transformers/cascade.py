"""Attention of several rows at once, where tokens that several of them have are attended once for all of them.

Each part gives a result and the logarithm of its sum of exponentials (LSE); parts are merged by these, in fp32. One
function, `attend`, serves CPU and CUDA; which kernel computes a part is decided here and nowhere else.

Source: cascade attention as in FlashInfer and Hydragen (one shared prefix), for any tree; docs/experiments.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentmem.tiers.frontier import LayerKV, SharedKV

CPU_SHARED_PRODUCT = 600
"""On a CPU, (rows - 1) x tokens from which tokens are attended once for all rows. Below, copying them into each row is
faster: a part more costs about ten small operations a layer (docs/benchmarks.md has the measurements)."""

CUDA_SHARED_PRODUCT = 8192
"""The same on CUDA, where small operations weigh more; an estimate (benchmarks/gpu.py measures it)."""

CAST_FROM_QUERIES = 24
"""On a CPU, bf16 KV that so many queries attend is cast to fp32 first: 1.4x faster on the CPU that was measured,
which has no AMX."""

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """What one layer's queries of a pass see.

    Attributes:
        keys: The rows' own keys `[N, H, S, D]`.
        values: The rows' own values `[N, H, S, D]`.
        mask: Which of their own slots queries see, `[N, 1, q, S]`; None: all of them.
        shared: KV of tokens that several rows have, all of which they see: the rows, keys and values `[H, T, D]`.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    shared: Sequence[tuple[tuple[int, ...], Tensor, Tensor]]


def attend(query: Tensor, rows: LayerRows, *, scale: float | None, sinks: Tensor | None = None) -> Tensor:
    """Attend `[N, Hq, q, D]` queries to all that their rows see; return `[N, Hq, q, Dv]`.

    Args:
        query: The queries; query heads are grouped over the KV heads, as in grouped-query attention.
        rows: What they see.
        scale: What scores are multiplied with; None: 1 / sqrt(D).
        sinks: A score per query head `[Hq]` that takes part in the softmax and has no value; None: there is none.
    """
    num_rows, num_heads, num_queries, dim = query.shape
    num_kv_heads = rows.keys.shape[1]
    folded = query.reshape(num_rows, num_kv_heads, -1, dim)  # [N, H, G * q, D]: a group's queries side by side
    scale = 1 / math.sqrt(dim) if scale is None else scale
    mask = rows.mask
    if mask is not None and folded.shape[2] != num_queries:
        mask = mask.repeat(1, 1, folded.shape[2] // num_queries, 1)
    result, lse = _part(folded, rows.keys, rows.values, mask, scale)
    if rows.shared:
        result, lse = _with_shared(folded, rows.shared, result, lse, scale)
    if sinks is not None:
        weight = sinks.float().view(1, num_kv_heads, -1, 1).expand(-1, -1, -1, num_queries).reshape(1, num_kv_heads, -1)
        result = result.float() * torch.sigmoid(lse - weight).unsqueeze(-1)
    return result.to(query.dtype).reshape(num_rows, num_heads, num_queries, -1)


def is_worth_sharing(device: torch.device, num_rows: int, num_tokens: int) -> bool:
    """Say whether attending tokens once for so many rows is faster than copying them into each."""
    product = CUDA_SHARED_PRODUCT if device.type == "cuda" else CPU_SHARED_PRODUCT
    return (num_rows - 1) * num_tokens >= product


def shared_layer(shared: Sequence[SharedKV], index: int) -> list[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Return what rows share, for one stored layer."""
    return [(part.rows, *part.layers[index]) for part in shared]


def _with_shared(
    folded: Tensor,
    shared: Sequence[tuple[tuple[int, ...], Tensor, Tensor]],
    result: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Merge what rows share into their own results `[N, H, Q, Dv]` and LSE `[N, H, Q]`."""
    result, lse = result.float(), lse.clone(memory_format=torch.contiguous_format)
    for rows, keys, values in shared:
        chosen = _chosen(rows)
        part, part_lse = _shared_part(folded[chosen], keys, values, scale)
        total = torch.logaddexp(lse[chosen], part_lse)
        own_weight, part_weight = (lse[chosen] - total).exp_(), (part_lse - total).exp_()
        merged = (result[chosen] * own_weight.unsqueeze(-1)).addcmul_(part, part_weight.unsqueeze(-1))
        if isinstance(chosen, slice) and chosen == slice(0, folded.shape[0]):
            result, lse = merged, total
        else:
            result[chosen], lse[chosen] = merged, total
    return result, lse


def _chosen(rows: tuple[int, ...]) -> slice | list[int]:
    """Return neighbouring rows as a slice, which copies nothing."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if last - first + 1 == len(rows) else list(rows)


def _shared_part(folded: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend all rows' queries `[R, H, Q, D]` to the same `[H, T, D]`, as one long sequence of queries; fp32."""
    num_rows, num_heads, num_queries, dim = folded.shape
    queries = folded.transpose(0, 1).reshape(1, num_heads, num_rows * num_queries, dim)
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    if keys.device.type == "cpu" and keys.dtype == torch.bfloat16 and queries.shape[2] >= CAST_FROM_QUERIES:
        queries, keys, values = queries.float(), keys.float(), values.float()
    part, lse = _part(queries, keys, values, None, scale)
    part = part.reshape(num_heads, num_rows, num_queries, -1).transpose(0, 1)
    return part.float(), lse.reshape(num_heads, num_rows, num_queries).transpose(0, 1)


def _part(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention `[B, H, Q, Dv]` of `[B, H, Q, D]` queries, and its LSE `[B, H, Q]` in fp32."""
    has_kernel = query.shape[-1] == values.shape[-1] and query.dtype in {torch.float32, torch.bfloat16, torch.float16}
    if has_kernel and query.device.type == "cpu":
        return _cpu(query, keys, values, mask, scale)
    if has_kernel and query.device.type == "cuda" and query.shape[-1] % 8 == 0:
        return _cuda(query, keys, values, mask, scale)
    return _plain(query, keys, values, mask, scale)


def _cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else _bias(mask, query.dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the one that gives the LSE
    result, lse = attention(query, keys, values, 0.0, False, attn_mask=bias, scale=scale)
    return result, lse


def _cuda(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001 - the one that gives the LSE
        result, lse, *_ = flash(query, keys, values, 0.0, False, False, scale=scale)
        return result, lse
    bias = None if mask is None else _aligned(_bias(mask, query.dtype), query)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001 - as above
    result, lse, *_ = efficient(query, keys, values, bias, True, 0.0, False, scale=scale)
    return result, lse[..., : query.shape[2]]


def _plain(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, _HIDDEN)
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp(), values.float()).to(query.dtype), lse


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores: nothing where the mask is true."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, _HIDDEN)


def _aligned(bias: Tensor, query: Tensor) -> Tensor:
    """Return the bias for every head, in memory whose rows begin at multiples of 16 values, as the kernel wants."""
    width = bias.shape[-1]
    padded = torch.nn.functional.pad(bias, (0, -width % 16))
    return padded[..., :width].expand(query.shape[0], query.shape[1], -1, -1)


def rows_of(layer: LayerKV, stop: int) -> LayerKV:
    """Return the first `stop` slots of every row's keys and values."""
    keys, values = layer
    return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)
