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
    RECURRENT = "recurrent"
    SHARED = "shared"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer of the model.

    Attributes:
        kind: What the layer does with KV. SHARED layers read another layer's KV, RECURRENT layers keep a layer state
            only, and EMPTY layers have nothing.
        group: Index of the layer group that stores this layer's KV; None when it stores none.
        row: The layer's row in its group, the L of `[L, H, T, D]`; 0 when it stores none.
        window: Tokens that a SLIDING or CHUNKED layer sees, itself included; None for the other kinds.
        indexer_group: Index of the layer group that stores the keys of the layer's sparse-attention indexer; None when
            it has no indexer.
        indexer_row: The indexer's row in that group.
    """

    kind: LayerKind
    group: int | None
    row: int
    window: int | None = None
    indexer_group: int | None = None
    indexer_row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """One tensor that a layer updates as a whole with every token: it cannot be cut by token.

    Attributes:
        layer: Index of the layer.
        name: "conv" or "recurrent".
        index: Which of the layer's states of that name.
        shape: Its shape, a batch of 1 included.
        dtype: torch's name of its dtype.
    """

    layer: int
    name: str
    index: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers of the same geometry, stored together.

    Attributes:
        num_layers: L.
        num_heads: H, KV heads.
        key_dim: D of the keys.
        value_dim: D of the values (differs from the keys' under MLA; 0 for the keys of an indexer).
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
        states: What the layers keep that cannot be cut by token.
    """

    layers: tuple[LayerSpec, ...]
    groups: tuple[LayerGroup, ...]
    dtype: str
    block_size: int
    states: tuple[StateSpec, ...] = ()

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

    @property
    def state_nbytes(self) -> int:
        """Bytes of the layer states at one position."""
        return sum(math.prod(state.shape) * DTYPE_NBYTES[state.dtype] for state in self.states)
