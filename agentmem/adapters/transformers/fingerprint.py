"""The name of everything about a model that makes KV differ.

Every byte of every weight is read each time a store is opened: a cached answer would miss a weight that was changed in
memory, and a wrong hit is the worst fault (docs/decisions/004-fingerprint-reads-every-weight.md has the measured cost).
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentmem.ids import Fingerprint
from agentmem.kv.hashing import hash_fields
from agentmem.kv.spec import KVSpec

_TAG = b"agentmem/fingerprint/1"

_PIECE_NBYTES = 32 << 20
"""Weights are hashed in pieces of this size, so that threads share large ones evenly."""

_NOT_IDENTITY = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}
    | {"output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"}
    | {"chunk_size_feed_forward", "is_encoder_decoder"}
)
"""Fields of a transformers config that change no KV; what they say is read from the model itself where it matters."""


def model_fingerprint(model: PreTrainedModel, spec: KVSpec, num_threads: int) -> Fingerprint:
    """Return the model's name: weights by content, buffers, geometry, positions, attention kind, active adapters.

    Costs one pass over the weights at memory speed. Weights on a GPU are copied to the host piece by piece.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    pieces = [(name, index, piece) for name, tensor in tensors for index, piece in enumerate(_pieces(tensor))]
    with ThreadPoolExecutor(num_threads) as pool:
        sums = list(pool.map(lambda item: _digest(item[2]), pieces))
    weights = hashlib.blake2b(digest_size=32)
    for (name, index, _), piece_sum in zip(pieces, sums, strict=True):
        weights.update(hash_fields(b"piece", (name.encode(), index.to_bytes(8, "little"), piece_sum)))
    for name, tensor in tensors:
        weights.update(
            hash_fields(b"tensor", (name.encode(), str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode()))
        )
    config = model.config.get_text_config(decoder=True)
    fields = (
        type(model).__name__.encode(),
        weights.digest(),
        b"".join(_canonical(config.to_dict())),
        str(getattr(config, "_attn_implementation", "")).encode(),
        str(spec).encode(),
        b"".join(_adapters(model)),
    )
    return Fingerprint(hash_fields(_TAG, fields))


def tokenizer_hashes(tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, str]:
    """Return hex names of the tokenizer and of its chat template; "" for what there is not."""
    if tokenizer is None:
        return "", ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = _canonical(dict(tokenizer.get_vocab())) if backend is None else (backend.to_str().encode(),)
    content = b"".join(vocabulary)
    template = getattr(tokenizer, "chat_template", None)
    template_hash = hashlib.blake2b(str(template).encode(), digest_size=16).hexdigest() if template else ""
    return hashlib.blake2b(content, digest_size=16).hexdigest(), template_hash


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Cut a tensor into flat byte pieces, without copying a contiguous one."""
    flat = tensor.detach().reshape(-1)
    step = max(1, _PIECE_NBYTES // max(1, flat.element_size()))
    yield from flat.split(step) if flat.numel() else ()


def _digest(piece: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(piece.cpu().contiguous().view(torch.uint8).numpy().data)


def _canonical(value: object) -> Iterator[bytes]:
    """Yield a config value as bytes that do not depend on dict order or on how floats print."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            if key not in _NOT_IDENTITY and not str(key).endswith("_token_id"):
                yield hash_fields(b"entry", (str(key).encode(), *_canonical(value[key])))
    elif isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        yield hash_fields(b"list", (hash_fields(b"item", _canonical(item)) for item in items))
    elif isinstance(value, float):
        yield b"float:" + value.hex().encode()
    elif value is None or isinstance(value, str | int | torch.dtype):
        yield type(value).__name__.encode() + b":" + str(value).encode()
    else:  # an object prints its address, which differs in every process
        yield type(value).__name__.encode()


def _adapters(model: PreTrainedModel) -> Iterator[bytes]:
    """Yield the names of active LoRA adapters, whose weights are among the parameters. No adapter yields nothing."""
    if getattr(model, "_hf_peft_config_loaded", False):
        yield from (hash_fields(b"adapter", (name.encode(),)) for name in model.active_adapters())
