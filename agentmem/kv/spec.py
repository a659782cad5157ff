"""The geometry of a model's KV: which layers keep what, and how large a token is.

Knows nothing of tensors' values, of models or of storage; adapters derive a spec from a model.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

DTYPE_NBYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per value of the dtypes that KV may have, by torch's own names."""


class LayerKind(StrEnum):
    """What a layer of the model does with KV."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    SHARED = "shared"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of the model.

    Attributes:
        kind: What the layer does with KV. SHARED layers read another layer's KV and EMPTY layers have none.
        group: Index of the layer group that stores this layer's KV; None when it stores none.
        row: The layer's row in its group, the L of `[L, H, T, D]`; 0 when it stores none.
        window: Tokens that a SLIDING or CHUNKED layer sees, itself included; None for the other kinds.
    """

    kind: LayerKind
    group: int | None
    row: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of the same geometry, stored together.

    Attributes:
        num_layers: L.
        num_heads: H, KV heads.
        key_dim: D of the keys.
        value_dim: D of the values (differs from the keys' under MLA).
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Geometry of the KV of one model.

    A block or segment has two sections per group, keys then values, in the order of the groups; each section is
    `[L, H, T, D]`.

    Attributes:
        layers: One entry per layer of the model, in order.
        groups: The layer groups.
        dtype: torch's name of the KV's dtype, such as "bfloat16".
        block_size: Tokens per block.
    """

    layers: tuple[LayerSpec, ...]
    groups: tuple[LayerGroup, ...]
    dtype: str
    block_size: int

    def section_shapes(self, num_tokens: int) -> list[tuple[int, int, int, int]]:
        """Return the shape `[L, H, T, D]` of each section of `num_tokens` tokens."""
        return [
            (group.num_layers, group.num_heads, num_tokens, dim)
            for group in self.groups
            for dim in (group.key_dim, group.value_dim)
        ]

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        return sum(math.prod(shape) for shape in self.section_shapes(1)) * DTYPE_NBYTES[self.dtype]
