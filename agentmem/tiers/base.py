"""What every tier can do; the conformance suite in `agentmem.testing.tier_suite` spells it out in tests.

Knows no tier.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from agentmem.ids import BlockDigest


class Tier(Protocol):
    """A place that keeps blocks by their digest. Thread-safe.

    How a block gets in differs: RAM takes tensors, disk takes records.
    """

    @property
    def name(self) -> str:
        """The glossary's word for the tier, as reports print it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the tier's blocks take there, all of them."""
        ...

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether the block is here, without touching it."""
        ...

    def load(self, digest: BlockDigest, out: Sequence[Tensor]) -> object:
        """Copy a block into `out`, one `[L, H, T, D]` per section with any strides, bit for bit as it was stored.

        Returns:
            Something true once `out` is filled.

        Raises:
            NotFoundError: The block is not here; a tier that is asked on the way to a lower one returns False instead.
                Either way `out` is untouched.
            CorruptionError: The bytes fail their checksums; what `out` holds is undefined.
            SpecMismatchError: `out` has another geometry than the block.
        """
        ...

    def remove(self, digest: BlockDigest) -> None:
        """Drop this tier's copy; nothing happens when there is none.

        Raises:
            InvalidInputError: A checkpoint names the block, and the tier counts that.
        """
        ...
