"""The tiers below the disk, one after the other: what they hold is verified here, and what fails is said.

Knows the tiers by their contract alone. Nothing that goes wrong below is an error of the caller's: KV that cannot be
had is computed again.
"""

import logging
from collections.abc import Sequence

import torch

from agentmem.errors import (
    AgentMemError,
    CorruptionError,
    FormatVersionError,
    NotFoundError,
    SpecMismatchError,
    TierUnavailableError,
)
from agentmem.ids import BlockDigest, BlockHash, short
from agentmem.kv import record as record_format
from agentmem.kv.hashing import lossy_hash
from agentmem.kv.record import Record
from agentmem.kv.spec import KVSpec
from agentmem.reasons import Reason
from agentmem.stats import Counters
from agentmem.tiers.blocks import Outcome, Want, copy_in
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.layerstream import LayerStream, can_stream
from agentmem.tiers.lossy import LossyTier
from agentmem.tiers.rates import Rates
from agentmem.tiers.remote import LayeredTier, RecordTier

logger = logging.getLogger(__name__)


class LowerTiers:
    """Tiers that keep records on other machines, the nearest first. Thread-safe.

    Attributes:
        tiers: The tiers.
        names: What they are called.
        layered: Those of them that give blocks layer by layer.
        lossy: Those of them that may give other KV than was put there, with their codecs.
        rates: How fast each of them was so far, in bytes of KV per second, and the model, in tokens.
    """

    def __init__(self, tiers: Sequence[RecordTier], *, disk: DiskTier, counters: Counters) -> None:
        """Ask `tiers` in turn; what they give rises to `disk`."""
        self.tiers = tuple(tiers)
        self.names = frozenset(tier.name for tier in self.tiers)
        self.layered = {tier.name: tier for tier in self.tiers if isinstance(tier, LayeredTier)}
        self.lossy = {tier.name: tier.codec for tier in self.tiers if isinstance(tier, LossyTier)}
        self.rates = Rates()
        self._disk = disk
        self._counters = counters

    def load(self, wanted: Sequence[Want]) -> list[Outcome]:
        """Copy blocks to where they are wanted, from whichever tier has them; verify every byte."""
        found = [Outcome(None, "", Reason.MISSING)] * len(wanted)
        for tier in self.tiers:
            left = [index for index, outcome in enumerate(found) if not outcome.tier]
            outcomes = self._load_from(tier, [wanted[index] for index in left]) if left else []
            for index, outcome in zip(left, outcomes, strict=True):
                found[index] = outcome or found[index]
        return found

    def stream(self, name: str, wanted: Sequence[Want], spec: KVSpec) -> LayerStream | None:
        """Begin to load blocks from a layered tier, layer by layer; None when that is not possible."""
        tier = self.layered[name]
        try:
            heads = tier.fetch_heads([want.block.digest or BlockDigest(b"") for want in wanted])
            found = [head for head in heads if head is not None]
            return LayerStream(tier, wanted, found, spec) if can_stream(wanted, heads) else None
        except AgentMemError as error:
            self._note_failure(tier, error)
        return None

    def find_many(self, names: Sequence[BlockHash]) -> list[BlockDigest | None]:
        """Return for each token name a block of those tokens that some tier holds, computed by whomever, or None."""
        found: list[BlockDigest | None] = [None] * len(names)
        for tier in self.tiers:
            left = [index for index, digest in enumerate(found) if digest is None]
            try:
                digests = tier.find_many([names[index] for index in left]) if left else []
            except AgentMemError as error:
                self._note_failure(tier, error)
                continue
            for index, digest in zip(left, digests, strict=True):
                found[index] = digest
        return found

    def holders(self, digests: Sequence[BlockDigest]) -> list[str]:
        """Return for each block the nearest tier that holds it, "" where none does."""
        names = [""] * len(digests)
        for tier in self.tiers:
            left = [index for index, name in enumerate(names) if not name]
            try:
                held = tier.contains_many([digests[index] for index in left]) if left else []
            except AgentMemError as error:
                self._note_failure(tier, error)
                continue
            for index, is_here in zip(left, held, strict=True):
                names[index] = tier.name if is_here else ""
        return names

    @property
    def pool(self) -> RecordTier | None:
        """The nearest tier that may lose what it holds; None when there is none."""
        return next((tier for tier in self.tiers if not tier.is_durable), None)

    def durable_or_none(self) -> RecordTier | None:
        """Return the nearest tier that a last copy may be in; None when there is none."""
        return next((tier for tier in self.tiers if tier.is_durable), None)

    def durable(self) -> RecordTier:
        """Return the nearest tier that a last copy may be in.

        Raises:
            NotFoundError: There is none.
        """
        tier = self.durable_or_none()
        if tier is None:
            raise NotFoundError("the store has no durable tier below the disk: give Config.lake, or tiers= to open")
        return tier

    def close(self) -> None:
        """Let go of all servers."""
        for tier in self.tiers:
            tier.close()

    def _load_from(self, tier: RecordTier, wanted: Sequence[Want]) -> list[Outcome | None]:
        """Load what one tier has; None for what it does not have."""
        digests = [want.block.digest or BlockDigest(b"") for want in wanted]
        with self.rates.measuring(tier.name) as measured:
            try:
                records = tier.fetch_many(digests)
            except AgentMemError as error:
                return [Outcome(None, "", self._note_failure(tier, error))] * len(wanted)
            outcomes = [
                None if data is None else self._take(tier, want, data)
                for want, data in zip(wanted, records, strict=True)
            ]
            measured.add(sum(_nbytes(want) for want, data in zip(wanted, records, strict=True) if data is not None))
        return outcomes

    def _take(self, tier: RecordTier, want: Want, data: bytes) -> Outcome:
        """Verify a record, copy what is wanted of it, and let it rise to the disk."""
        try:
            record = _checked(want, data, self.lossy.get(tier.name, ""))
        except (CorruptionError, FormatVersionError, SpecMismatchError) as error:
            logger.warning("block %s of tier %s is not used: %s", short(want.block.block_hash), tier.name, error)
            self._counters.add(f"{tier.name}_blocks_damaged")
            self._remove(tier, want.block.digest)
            return Outcome(None, "", Reason.DAMAGED)
        if record.origin is not None:  # it never rises: nothing here may pass for the exact block
            self._counters.add(f"{tier.name}_blocks_lossy")
            return Outcome(want.block, tier.name, Reason.COMPLETE, self.lossy[tier.name])
        try:
            self._disk.rise(record)
        except AgentMemError as error:  # a full or read-only disk: the copy below remains
            logger.info("block %s stays in tier %s: %s", short(record.digest), tier.name, error)
        return Outcome(want.block, tier.name, Reason.COMPLETE)

    def _remove(self, tier: RecordTier, digest: BlockDigest | None) -> None:
        """Remove a damaged copy, unless it may be the last one: then it stays for whoever looks into it."""
        if digest is None or tier.is_durable:
            return
        try:
            tier.remove_many([digest])
        except AgentMemError as error:
            self._note_failure(tier, error)

    def _note_failure(self, tier: RecordTier, error: AgentMemError) -> Reason:
        """Count that a tier failed as a whole; return why what it holds cannot be had."""
        self._counters.add(f"{tier.name}_failures")
        logger.warning("tier %s is left out (%s): %s", tier.name, error.reason, error)
        return Reason.TIER_UNAVAILABLE if isinstance(error, TierUnavailableError) else Reason.DAMAGED


def _checked(want: Want, data: bytes, codec: str) -> Record:
    """Decode a record to where it is wanted, and return it; a lossy one only from a tier of that codec.

    Raises:
        CorruptionError: It is damaged, or another block's.
        FormatVersionError: It was written in a format that this version does not read.
        SpecMismatchError: It has another geometry.
    """
    meta = record_format.read_meta(data)
    is_lossy = meta.origin == want.block.digest and bool(codec) and meta.block_hash == _lossy_name(want, codec)
    if meta.digest != want.block.digest and not is_lossy:
        raise CorruptionError(f"block {meta.digest.hex()} was found in its place")
    is_direct = want.num_tokens == want.block.num_tokens and want.is_on_cpu
    shapes = [(*section.shape[:2], want.block.num_tokens, section.shape[3]) for section in want.out]
    sections = (
        want.out
        if is_direct
        else [torch.empty(shape, dtype=section.dtype) for shape, section in zip(shapes, want.out, strict=True)]
    )
    record_format.unpack(data, sections)
    if not is_direct:
        copy_in(sections, want)
    return Record.of(meta, data)


def _lossy_name(want: Want, codec: str) -> BlockHash:
    return lossy_hash(want.block.digest or BlockDigest(b""), codec)


def _nbytes(want: Want) -> int:
    return sum(section.nbytes for section in want.out)
