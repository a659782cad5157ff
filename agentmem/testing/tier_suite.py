"""What every tier promises, as tests: subclass `TierSuite`, say how to make a tier and put a block in, run pytest.

Source: zarr.testing.store.StoreTests, a suite that any store may inherit.
"""

# ruff: noqa: S101 - these are tests

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentmem.errors import NotFoundError, SpecMismatchError
from agentmem.ids import BlockDigest, BlockHash, Fingerprint
from agentmem.kv.record import Record, pack
from agentmem.tiers.base import Tier

SHAPES = [(3, 2, 16, 8), (3, 2, 16, 8), (1, 1, 16, 32), (1, 1, 16, 4)]
"""Sections `[L, H, T, D]` of the suite's blocks: two layer groups, the second with other keys than values."""


def make_block(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return a block's sections of random KV; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def make_record(seed: int, *, name: int | None = None, sections: list[Tensor] | None = None) -> Record:
    """Pack the block `seed` under the token name `name`, one byte; by default the two are the same."""
    return pack(
        make_block(seed) if sections is None else sections,
        block_hash=BlockHash(bytes([seed if name is None else name]) * 32),
        fingerprint=Fingerprint(bytes(32)),
        start=0,
    )


def empty_like(sections: list[Tensor]) -> list[Tensor]:
    """Return sections of the same geometry that hold other values."""
    return [torch.full_like(section, -1.0) for section in sections]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Compare bit for bit: unlike `torch.equal`, NaN equals itself and -0.0 differs from 0.0."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return all(
        torch.equal(a.contiguous().view(words[a.element_size()]), b.contiguous().view(words[b.element_size()]))
        for a, b in zip(left, right, strict=True)
    )


class TierSuite(ABC):
    """The conformance suite; subclasses give the two hooks."""

    @abstractmethod
    def open_tier(self, path: Path) -> Iterator[Tier]:
        """Yield an empty tier that may use the directory `path`, and close it afterwards."""

    @abstractmethod
    def put(self, tier: Tier, sections: list[Tensor], seed: int) -> BlockDigest:
        """Store a block, wait until it is there, and return its digest; `seed` differs for different blocks."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """An empty tier."""
        yield from self.open_tier(tmp_path / "tier")

    def load(self, tier: Tier, digest: BlockDigest, out: list[Tensor]) -> bool:
        """Load, with both ways of saying that the block is not there made one."""
        try:
            return bool(tier.load(digest, out))
        except NotFoundError:
            return False

    def test_an_empty_tier_holds_nothing(self, tier: Tier) -> None:
        """Nothing stored, nothing counted."""
        assert not tier.contains(BlockDigest(bytes(32)))
        assert tier.nbytes == 0

    def test_a_tier_has_a_name(self, tier: Tier) -> None:
        """Reports print it."""
        assert tier.name.isidentifier()

    def test_a_stored_block_is_contained(self, tier: Tier) -> None:
        """`contains` follows a store at once."""
        digest = self.put(tier, make_block(1), 1)

        assert tier.contains(digest)

    def test_a_block_comes_back_bit_for_bit(self, tier: Tier) -> None:
        """NaNs with payloads, -0.0, infinities and subnormals included."""
        sections = make_block(1)
        sections[0].view(torch.int16)[0, 0, 0] = torch.tensor([0x7FC1, -1, -0x8000, 1, 0x7F80, 0, 0x7FFF, 2])
        digest = self.put(tier, sections, 1)
        out = empty_like(sections)

        assert self.load(tier, digest, out)
        assert same_bits(sections, out)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_every_dtype_comes_back_bit_for_bit(self, tier: Tier, dtype: torch.dtype) -> None:
        """Not only the usual bfloat16."""
        sections = make_block(1, dtype)
        digest = self.put(tier, sections, 1)
        out = empty_like(sections)

        assert self.load(tier, digest, out)
        assert same_bits(sections, out)

    def test_a_block_is_loaded_into_a_slice_of_a_segment_and_nowhere_else(self, tier: Tier) -> None:
        """The target is strided; its neighbours are other tokens."""
        sections = make_block(1)
        digest = self.put(tier, sections, 1)
        segments = [torch.zeros(s.shape[0], s.shape[1], 64, s.shape[3], dtype=s.dtype) for s in sections]

        assert self.load(tier, digest, [segment[:, :, 20:36] for segment in segments])
        assert same_bits(sections, [segment[:, :, 20:36] for segment in segments])
        assert all(not segment[:, :, :20].any() and not segment[:, :, 36:].any() for segment in segments)

    def test_a_stored_block_is_a_copy(self, tier: Tier) -> None:
        """Neither the source nor an earlier target is shared."""
        sections = make_block(1)
        digest = self.put(tier, sections, 1)
        for section in sections:
            section.zero_()
        first, second = empty_like(sections), empty_like(sections)

        self.load(tier, digest, first)
        for section in first:
            section.zero_()
        self.load(tier, digest, second)

        assert same_bits(make_block(1), second)

    def test_storing_a_block_twice_holds_it_once(self, tier: Tier) -> None:
        """The digest names the bytes."""
        digest = self.put(tier, make_block(1), 1)
        nbytes = tier.nbytes

        assert self.put(tier, make_block(1), 1) == digest
        assert tier.nbytes == nbytes

    def test_a_missing_block_leaves_the_target_untouched(self, tier: Tier) -> None:
        """A caller may still hold something there."""
        self.put(tier, make_block(1), 1)
        out = make_block(2)

        assert not self.load(tier, BlockDigest(bytes(32)), out)
        assert same_bits(make_block(2), out)

    def test_a_target_of_another_geometry_is_refused(self, tier: Tier) -> None:
        """Never a block cut or bent to fit."""
        digest = self.put(tier, make_block(1), 1)
        out = [section[:, :, 1:].contiguous() for section in make_block(1)]

        with pytest.raises(SpecMismatchError):
            tier.load(digest, out)

    def test_a_removed_block_is_gone_and_its_bytes_with_it(self, tier: Tier) -> None:
        """And no other block is."""
        kept = self.put(tier, make_block(1), 1)
        nbytes = tier.nbytes
        gone = self.put(tier, make_block(2), 2)

        tier.remove(gone)

        assert not tier.contains(gone)
        assert tier.contains(kept)
        assert tier.nbytes == nbytes
        assert not self.load(tier, gone, make_block(3))

    def test_removing_a_block_that_is_not_there_does_nothing(self, tier: Tier) -> None:
        """Two callers may drop the same block."""
        digest = self.put(tier, make_block(1), 1)

        tier.remove(BlockDigest(bytes(32)))

        assert tier.contains(digest)

    def test_a_removed_block_can_be_stored_again(self, tier: Tier) -> None:
        """Removal leaves no trace."""
        digest = self.put(tier, make_block(1), 1)
        tier.remove(digest)
        out = empty_like(make_block(1))

        assert self.put(tier, make_block(1), 1) == digest
        assert self.load(tier, digest, out)
        assert same_bits(make_block(1), out)

    def test_threads_load_different_blocks_at_once(self, tier: Tier) -> None:
        """Buffers are not shared between threads."""
        digests = [self.put(tier, make_block(seed), seed) for seed in range(4)]
        wrong: list[int] = []

        def work(seed: int) -> None:
            for _ in range(20):
                out = empty_like(make_block(seed))
                if not self.load(tier, digests[seed], out) or not same_bits(make_block(seed), out):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []
