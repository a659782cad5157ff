"""The two names of a block: what its tokens are, and what its bytes are.

Every hash is blake2b-256 over tagged, length-prefixed fields: no two field lists give the same input. Knows nothing of
storage. On-disk names depend on this file: change a tag and the store's format version must rise.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from agentmem.ids import BlockDigest, BlockHash, Fingerprint

_BLOCK_TAG = b"agentmem/block/1"
_DIGEST_TAG = b"agentmem/digest/1"


def hash_fields(tag: bytes, fields: Iterable[bytes]) -> bytes:
    """Return blake2b-256 of `tag` and `fields`, each preceded by its length as u64-le."""
    state = hashlib.blake2b(digest_size=32)
    for field in (tag, *fields):
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    return state.digest()


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as u32-le bytes."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes | memoryview) -> "array[int]":
    """Return the token ids in u32-le bytes."""
    tokens = array("I")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def root_hash(fingerprint: Fingerprint, salt: bytes, regime: bytes = b"") -> BlockHash:
    """Return the name of the empty prefix under one model and one tenant: the parent of every first block.

    Args:
        fingerprint: The model.
        salt: The tenant's.
        regime: The rotary regime of a model whose KV depends on the length of the sequence; b"" for other models.
    """
    return BlockHash(hash_fields(_BLOCK_TAG, (b"root", fingerprint, salt, *([regime] if regime else []))))


def chain_hash(parent: BlockHash, tokens: Sequence[int], marks: Sequence[bytes] = ()) -> BlockHash:
    """Return the token name of a block: of its own tokens and, through `parent`, of all tokens before them.

    Args:
        parent: The name of the block before it.
        tokens: Its token ids.
        marks: What its KV depends on beside tokens: each mark's bytes, relative to the block's start, in order.

    Source: vLLM's and SGLang's chained block hashes, with full 32-byte digests.
    """
    return BlockHash(hash_fields(_BLOCK_TAG, (b"next", parent, pack_tokens(tokens), *marks)))


def state_hash(parent: BlockHash, tokens: Sequence[int], marks: Sequence[bytes] = ()) -> BlockHash:
    """Return the name of the layer states after `tokens`, which follow the block `parent` (see `chain_hash`)."""
    return BlockHash(hash_fields(_BLOCK_TAG, (b"state", parent, pack_tokens(tokens), *marks)))


def root_state_hash(root: BlockHash, marks: Sequence[bytes]) -> BlockHash:
    """Return the name of what belongs to the root: KV of an encoder's output, named by the encoder's inputs."""
    return BlockHash(hash_fields(_BLOCK_TAG, (b"encoded", root, *marks)))


def media_hash(salt: bytes, digest: bytes) -> BlockHash:
    """Return the name of the model inputs whose content `digest` names, under a tenant's salt."""
    return BlockHash(hash_fields(_BLOCK_TAG, (b"media", salt, digest)))


def part_hash(name: BlockHash, part: int) -> BlockHash:
    """Return the name of one of the records that hold what `name` names."""
    return BlockHash(hash_fields(_BLOCK_TAG, (b"part", name, part.to_bytes(4, "little"))))


def lossy_hash(origin: BlockDigest, codec: str) -> BlockHash:
    """Return what stands in the place of the token name in a lossy record of the block `origin`."""
    return BlockHash(hash_fields(_BLOCK_TAG, (b"lossy", origin, codec.encode())))


def content_digest(block_hash: BlockHash, section_sums: Sequence[bytes]) -> BlockDigest:
    """Return the byte name of a block: of its token name and the xxh3-128 of each section's raw bytes, in order."""
    return BlockDigest(hash_fields(_DIGEST_TAG, (block_hash, *section_sums)))
