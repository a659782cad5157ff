"""How small and how fast KV becomes a record and comes back, beside plain zstd and ZipNN.

    python benchmarks/codec.py [--json]

The KV is real: SmolLM2-135M in bfloat16 over code, prose and JSON that Python itself brings along, in blocks of 64
tokens. MB/s are megabytes of KV per second of CPU time of the whole process (helper threads included), so per core.
Ours is the whole record: packed from slices of a segment and unpacked into slices of another, with every checksum. The
others only turn contiguous bytes into bytes and back, without a checksum.
"""

import argparse
import importlib.metadata
import json
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import zipnn
import zstandard
from torch import Tensor

from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.record import Record, pack, unpack
from agentmem.testing.models import smollm2

NUM_TOKENS = 2048
BLOCK_SIZE = 64
BLOCK_STEP = 4
NUM_REPEATS = 5
MB = 1e6

Block = list[Tensor]
"""Keys and values `[L, H, T, D]` of one block."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to store a block: `encode` gives stored bytes, `decode` brings the block back and returns its bytes."""

    name: str
    prepare: Callable[[Block], object]
    encode: Callable[[object], list[bytes]]
    decode: Callable[[list[bytes]], object]


def read_texts() -> dict[str, str]:
    """Return real text of three kinds that is on every machine."""
    packages = sorted(importlib.metadata.distributions(), key=lambda package: package.name.lower())
    return {
        "code": Path(argparse.__file__).read_text(encoding="utf-8"),
        "prose": "\n".join(pydoc_data.topics.topics.values()),
        "json": json.dumps([package.metadata.json for package in packages], indent=1),
    }


def compute_kv(text: str, model: torch.nn.Module, tokenizer: Callable[..., dict[str, Tensor]]) -> Block:
    """Return the KV of the first `NUM_TOKENS` tokens of `text` as two sections."""
    tokens = tokenizer(text[: 20 * NUM_TOKENS], return_tensors="pt")["input_ids"][:, :NUM_TOKENS]
    with torch.no_grad():
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    return [torch.cat([getattr(layer, name) for layer in cache.layers]) for name in ("keys", "values")]


def methods(out: Block) -> list[Method]:
    """Return what is compared; `out` is where records are unpacked."""

    def pack_with(codec: str) -> Callable[[Block], list[bytes]]:
        return lambda block: [_pack(block, codec).data]

    def unpack_into(stored: list[bytes]) -> Block:
        unpack(stored[0], out)
        return out

    zstd = zstandard.ZstdCompressor(level=3)
    unzstd = zstandard.ZstdDecompressor()
    zip_nn = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    return [
        Method("agentmem lossless", list, pack_with("lossless"), unpack_into),
        Method("agentmem raw", list, pack_with("raw"), unpack_into),
        Method(
            "zstd-3",
            _as_bytes,
            lambda raw: [zstd.compress(x) for x in raw],
            lambda z: [unzstd.decompress(x) for x in z],
        ),
        Method(
            "zipnn",
            _as_bytes,
            lambda raw: [zip_nn.compress(x) for x in raw],
            lambda z: [zip_nn.decompress(x) for x in z],
        ),
    ]


def measure(method: Method, blocks: list[Block]) -> dict[str, float | str]:
    """Return ratio and speed of one method over blocks, after checking that it is lossless."""
    encode_s = decode_s = 0.0
    raw_nbytes = stored_nbytes = 0
    for block in blocks:
        given = method.prepare(block)
        stored = method.encode(given)
        _check_same(block, method.decode(stored), method.name)
        encode_s += _best_s(lambda given=given: method.encode(given))
        decode_s += _best_s(lambda stored=stored: method.decode(stored))
        raw_nbytes += sum(section.nbytes for section in block)
        stored_nbytes += sum(map(len, stored))
    return {
        "method": method.name,
        "ratio": raw_nbytes / stored_nbytes,
        "encode_mb_per_s": raw_nbytes / encode_s / MB,
        "decode_mb_per_s": raw_nbytes / decode_s / MB,
    }


def run() -> dict[str, object]:
    """Measure everything; one row a text and method, and one of their means."""
    torch.set_num_threads(1)
    model, tokenizer = smollm2()
    rows = []
    for name, text in read_texts().items():
        sections = compute_kv(text, model, tokenizer)
        num_blocks = sections[0].shape[2] // BLOCK_SIZE
        blocks = [_cut(sections, index) for index in range(0, num_blocks, BLOCK_STEP)]
        out = _cut([torch.zeros_like(section) for section in sections], 1)
        rows += [{"text": name} | measure(method, blocks) for method in methods(out)]
    return {"benchmark": "codec", "block_size": BLOCK_SIZE, "dtype": "bfloat16", "rows": rows + _means(rows)}


def main() -> None:
    """Print a table, or the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    is_json = parser.parse_args().json
    result = run()
    if is_json:
        print(json.dumps(result, indent=2))
        return
    print(f"{'text':8}{'method':20}{'ratio':>8}{'encode MB/s':>14}{'decode MB/s':>14}   (of KV, per core)")
    for row in result["rows"]:
        print(
            f"{row['text']:8}{row['method']:20}{row['ratio']:8.3f}"
            f"{row['encode_mb_per_s']:14.0f}{row['decode_mb_per_s']:14.0f}"
        )


def _pack(block: Block, codec: str) -> Record:
    return pack(block, block_hash=BlockHash(bytes(32)), fingerprint=Fingerprint(bytes(32)), start=0, codec=codec)


def _cut(sections: Block, index: int) -> Block:
    return [section[:, :, index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE] for section in sections]


def _as_bytes(block: Block) -> list[bytes]:
    return [section.contiguous().view(torch.int16).numpy().tobytes() for section in block]


def _check_same(block: Block, decoded: object, name: str) -> None:
    found = [_as_bytes([x])[0] if isinstance(x, Tensor) else bytes(x) for x in decoded]
    if found != _as_bytes(block):
        raise RuntimeError(f"{name} does not give the block back")


def _best_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def _means(rows: list[dict]) -> list[dict]:
    names = dict.fromkeys(row["method"] for row in rows)
    columns = ("ratio", "encode_mb_per_s", "decode_mb_per_s")
    return [
        {"text": "mean", "method": name}
        | {
            column: statistics.harmonic_mean([row[column] for row in rows if row["method"] == name])
            for column in columns
        }
        for name in names
    ]


if __name__ == "__main__":
    main()
