"""A tier that keeps records coded lossily, beside whatever exact ones it holds: smaller, and never taken for exact.

A lossy record has names of its own, made of the exact block's and the codec's: whoever shares the server and asks for
the exact block, by digest or by tokens, finds no lossy one. Knows no server.
"""

from collections.abc import Sequence

import torch

from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv import record as record_format
from agentmem.kv.hashing import lossy_hash
from agentmem.kv.record import Record
from agentmem.tiers.remote import RecordTier


class LossyTier:
    """A `RecordTier` that is asked for exact blocks, and gives the records of lossy ones that stand for them.

    Attributes:
        codec: The lossy codec.
        is_durable: False: a lossy copy is never the last one.
    """

    is_durable = False

    def __init__(self, tier: RecordTier, codec: str) -> None:
        """Keep lossy records in `tier`, which this closes."""
        self.codec = codec
        self._tier = tier

    @property
    def name(self) -> str:
        """The name of the tier underneath."""
        return self._tier.name

    def contains_many(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each block whether it is here, or a lossy one that stands for it."""
        exact = self._tier.contains_many(digests)
        return [is_exact or lossy is not None for is_exact, lossy in zip(exact, self._lossy(digests), strict=True)]

    def fetch_many(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return each block's record: the exact one if it is here, else a lossy one, else None."""
        found = dict(zip(digests, self._tier.fetch_many(digests), strict=True))
        missing = [digest for digest in found if found[digest] is None]
        named = [(digest, lossy) for digest, lossy in zip(missing, self._lossy(missing), strict=True) if lossy]
        if named:
            records = self._tier.fetch_many([lossy for _, lossy in named])
            found.update(zip((digest for digest, _ in named), records, strict=True))
        return [found[digest] for digest in digests]

    def put_many(self, records: Sequence[Record]) -> list[bool]:
        """Store records, coded lossily; first blocks, and what is lossy or was computed from lossy KV, as they are.

        Raises:
            CorruptionError, FormatVersionError: A record is damaged, or of a newer version.
        """
        names = self._lossy([record.digest for record in records])
        new = [record for record, name in zip(records, names, strict=True) if name is None]
        taken = iter(self._tier.put_many([_coded(record, self.codec) for record in new]))
        return [True if name is not None else next(taken) for name in names]

    def find_many(self, names: Sequence[BlockHash]) -> list[BlockDigest | None]:
        """Return for each token name a block of those tokens that is here in its exact form, or None."""
        return self._tier.find_many(names)

    def remove_many(self, digests: Sequence[BlockDigest]) -> None:
        """Drop copies of blocks, exact ones and lossy ones."""
        lossy = [digest for digest in self._lossy(digests) if digest is not None]
        self._tier.remove_many([*digests, *lossy])

    def close(self) -> None:
        """Let go of the tier underneath."""
        self._tier.close()

    def _lossy(self, digests: Sequence[BlockDigest]) -> list[BlockDigest | None]:
        """Return for each exact block the digest of the lossy one that stands for it, or None."""
        return self._tier.find_many([lossy_hash(digest, self.codec) for digest in digests]) if digests else []


def _coded(record: Record, codec: str) -> Record:
    """Return what a lossy codec makes of a record: itself where that may not be done twice, or costs too much.

    The first block holds the sinks, which attention leans on: coded like the others it alone made the KL of the next
    token 5 to 10 times as large. Source: benchmarks/lossy.py.
    """
    meta = record_format.read_meta(record.data)
    if meta.is_lossy or meta.is_parent_lossy or meta.start == 0:
        return record
    sections = [torch.empty(section.shape, dtype=getattr(torch, meta.dtype)) for section in meta.sections]
    record_format.unpack(record.data, sections)
    return record_format.pack(
        sections,
        block_hash=meta.block_hash,
        fingerprint=meta.fingerprint,
        start=meta.start,
        codec=codec,
        rope=meta.rope,
        num_tokens=meta.num_tokens,
    )
