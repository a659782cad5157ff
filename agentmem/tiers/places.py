"""Where blocks are: the nearest tier that holds each of them. Loads nothing."""

from collections.abc import Sequence

from agentmem.ids import BlockDigest
from agentmem.tiers.blocks import SealedBlock
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.lower import LowerTiers


def whereabouts(blocks: Sequence[SealedBlock], host: HostTier, disk: DiskTier, lower: LowerTiers) -> list[str]:
    """Return the name of the nearest tier that holds each block, "" for one that is in none.

    Each tier is asked once, for all that no nearer one has.
    """
    digests = [block.digest or BlockDigest(b"") for block in blocks]
    is_on_device = [block.source is not None or block.digest is None for block in blocks]
    places = [
        "device" if is_here else host.name * host.contains(digest)
        for is_here, digest in zip(is_on_device, digests, strict=True)
    ]
    left = [index for index, place in enumerate(places) if not place]
    for index, is_here in zip(left, disk.are_here([digests[index] for index in left]), strict=True):
        places[index] = disk.name * is_here
    left = [index for index, place in enumerate(places) if not place]
    for index, name in zip(left, lower.holders([digests[index] for index in left]), strict=True):
        places[index] = name
    return places
