"""Lossy codecs keep to the bound that they store, decode to the same bits everywhere, and say what they are."""

import hashlib
import math
import struct
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentmem.errors import CorruptionError, FormatVersionError
from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.codec import CodecId, as_words, decode_section, encode_section, error_bound
from agentmem.kv.hashing import content_digest, lossy_hash
from agentmem.kv.header import pack_meta
from agentmem.kv.quant import STEPS
from agentmem.kv.record import Record, pack, read_meta, section_sums, unpack, unpack_many
from agentmem.levels import LOSSY_CODECS
from agentmem.tiers.parts import cut, join, num_parts

RATIOS = {"q1": 2.75, "q2": 3.36, "q3": 4.2, "q4": 5.6}
"""What the levels gave on real KV of SmolLM2, in blocks of 64 tokens."""

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCK_HASH = BlockHash(b"h" * 32)
FINGERPRINT = Fingerprint(b"f" * 32)


def like_kv(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values around a mean and with a spread that differ by channel, as KV has them."""
    generator = torch.Generator().manual_seed(seed)
    channel = (shape[0], shape[1], 1, shape[3])
    mean, spread = torch.randn(channel, generator=generator), torch.randn(channel, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * spread + 2 * mean).to(dtype)


def views(parts: list) -> list[memoryview]:
    return [memoryview(bytes(part)) for part in parts]


def round_trip(section: Tensor, codec: str, *, is_key: bool = True) -> tuple[CodecId, list[memoryview], Tensor]:
    codec_id, parts = encode_section(section, codec, is_key=is_key)
    out = torch.empty_like(section, memory_format=torch.contiguous_format)
    decode_section(codec_id, views(parts), out)
    return codec_id, views(parts), out


def largest_error(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().max())


def make_record(codec: str = "q2", num_tokens: int = 32, num_layers: int = 3) -> tuple[list[Tensor], Record]:
    sections = [like_kv((num_layers, 2, num_tokens, dim), seed=dim) for dim in (16, 8)]
    record = pack(sections, block_hash=BLOCK_HASH, fingerprint=FINGERPRINT, start=64, codec=codec, rope="default")
    return sections, record


def with_meta(data: bytes, **changes: object) -> bytes:
    """Change what a record says of itself, with a checksum of the header that fits."""
    meta = read_meta(data)
    head = len(pack_meta(meta))
    body_nbytes, num_tokens, payload_nbytes = struct.unpack_from("<IIQ", data, 8)
    fields = msgpack.unpackb(data[32 : 32 + body_nbytes]) | changes
    body = msgpack.packb({key: value for key, value in fields.items() if value is not None})

    header = struct.pack("<4sBBHIIQ", data[:4], data[4], data[5], 0, len(body), num_tokens, payload_nbytes)
    start = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + body)) + body
    return start.ljust(-(-len(start) // 64) * 64, b"\0") + data[head:]


@pytest.fixture(scope="module")
def real_kv(smollm2) -> tuple[Tensor, Tensor]:
    """Keys and values `[L, H, 320, D]` of SmolLM2 after a page of this repository's own documents."""
    model, tokenizer = smollm2
    text = (Path(__file__).parents[1] / "docs" / "durability.md").read_text()
    with torch.no_grad():
        cache = model(tokenizer(text, return_tensors="pt").input_ids[:, :320], use_cache=True).past_key_values
    keys, values = ([getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values"))
    return torch.stack(keys), torch.stack(values)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(16, 80), st.sampled_from([1, 3, 8, 64])),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(LOSSY_CODECS),
    seed=st.integers(0, 1 << 32),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 300.0]),
    is_key=st.booleans(),
)
@example(shape=(2, 2, 16, 8), dtype=torch.float32, codec="q1", seed=0, scale=0.0, is_key=True)
def test_every_value_comes_back_within_the_bound_that_is_stored(
    shape: tuple, dtype: torch.dtype, codec: str, seed: int, scale: float, is_key: bool
) -> None:
    section = (like_kv(shape, torch.float32, seed) * scale).to(dtype)

    codec_id, parts, out = round_trip(section, codec, is_key=is_key)

    assert largest_error(out, section) <= error_bound(codec_id, parts, section.shape)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_levels_shrink_real_kv_as_they_were_measured_and_keep_to_their_bounds(codec: str, real_kv: tuple) -> None:
    raw_nbytes = stored_nbytes = 0
    for first in range(64, 320, 64):
        for is_key, kv in zip((True, False), real_kv, strict=True):
            section = kv[:, :, first : first + 64]
            codec_id, parts, out = round_trip(section, codec, is_key=is_key)
            raw_nbytes += out.nbytes
            stored_nbytes += sum(part.nbytes for part in parts)

            assert codec_id == CodecId[codec.upper()]
            assert 0 < largest_error(out, section) <= error_bound(codec_id, parts, section.shape)

    assert raw_nbytes / stored_nbytes == pytest.approx(RATIOS[codec], rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_section_with_a_value_that_is_no_number_is_stored_bit_for_bit(value: float, dtype: torch.dtype) -> None:
    section = like_kv((2, 2, 32, 8), dtype)
    section[1, 0, 7, 3] = value

    codec_id, parts, out = round_trip(section, "q2")

    assert not codec_id.is_lossy
    assert error_bound(codec_id, parts, section.shape) == 0.0
    assert np.array_equal(as_words(out), as_words(section))


@pytest.mark.parametrize(
    "section",
    [
        like_kv((2, 2, 15, 8)),
        like_kv((2, 2, 32, 8), torch.float64),
        torch.full((1, 1, 16, 8), torch.finfo(torch.float32).max),
        torch.zeros(2, 2, 32, 0),
    ],
    ids=["few tokens", "float64", "the largest numbers", "no values"],
)
def test_what_cannot_be_quantised_is_stored_bit_for_bit(section: Tensor) -> None:
    codec_id, _, out = round_trip(section, "q1")

    assert not codec_id.is_lossy
    assert np.array_equal(as_words(out), as_words(section))


def test_values_far_from_the_rest_keep_to_the_bound_too() -> None:
    section = like_kv((2, 2, 64, 32))
    section[0, 1, 5, 3] = 4000.0

    codec_id, parts, out = round_trip(section, "q1")

    assert parts[3].nbytes > 0
    assert largest_error(out, section) <= error_bound(codec_id, parts, section.shape)


def test_a_section_of_many_bands_keeps_to_the_bound_of_its_widest() -> None:
    section = like_kv((10, 8, 256, 128))

    codec_id, parts, out = round_trip(section, "q3", is_key=False)

    assert len(parts) > 4
    assert largest_error(out, section) <= error_bound(codec_id, parts, section.shape)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.bfloat16, "79462aac24c391ab"), (torch.float16, "1b3b1c304915c121"), (torch.float32, "44a26c8c0167e6ea")],
)
def test_the_same_bytes_decode_to_the_same_bits_on_every_machine(dtype: torch.dtype, wanted: str) -> None:
    means = zstandard.compress((0x3F80 + 7 * np.arange(2 * 2 * 8)).astype("<u2").tobytes())
    steps = zstandard.compress((0x3D4D + 3 * np.arange(2 * 16)).astype("<u2").tobytes())
    codes = zstandard.compress((np.arange(2 * 2 * 16 * 8) * 37 % 255 - 127).astype(np.int8).tobytes())
    out = torch.empty(2, 2, 16, 8, dtype=dtype)

    decode_section(CodecId.Q2, views([means, steps, codes, b""]), out)

    assert hashlib.sha256(as_words(out).tobytes()).hexdigest()[:16] == wanted


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), is_cut_off=st.booleans())
def test_a_damaged_lossy_record_never_passes_for_another_one(where: float, flip: int, is_cut_off: bool) -> None:
    sections, record = make_record("q1")
    damaged = bytearray(record.data)
    damaged[int(where * len(damaged))] ^= flip
    if is_cut_off:
        del damaged[int(where * len(damaged)) :]
    wanted, out = ([torch.zeros_like(section) for section in sections] for _ in range(2))
    unpack(record.data, wanted)

    try:
        unpack(bytes(damaged), out)
    except (CorruptionError, FormatVersionError):
        out = wanted

    assert all(map(torch.equal, out, wanted))


@pytest.mark.parametrize(
    ("number", "part", "message"),
    [
        (0, zstandard.compress(np.full(16, 0x7F80, "<u2").tobytes()), "not finite"),
        (1, zstandard.compress(np.full(2, 0x8000, "<u2").tobytes()), "not above zero"),
        (1, zstandard.compress(np.zeros(3, "<u2").tobytes()), "declares 6"),
        (2, zstandard.compress(bytes(5)), "declares 5"),
        (3, bytes(4), "escapes"),
        (3, bytes(3), "3 bytes"),
    ],
)
def test_parts_that_no_section_has_are_damage(number: int, part: bytes, message: str) -> None:
    codec_id, parts = encode_section(like_kv((2, 1, 16, 8)), "q3")
    parts[number] = part

    with pytest.raises(CorruptionError, match=message):
        decode_section(codec_id, views(parts), torch.empty(2, 1, 16, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_lossy_record_has_its_own_digest_and_names_the_block_it_stands_for(codec: str) -> None:
    sections, record = make_record(codec)
    out = [torch.empty_like(section) for section in sections]

    meta = unpack(record.data, out)

    assert meta.is_lossy
    assert meta.origin == record.origin == content_digest(BLOCK_HASH, section_sums(sections))
    assert meta.digest == record.digest == content_digest(meta.block_hash, section_sums(out))
    assert meta.block_hash == lossy_hash(meta.origin, codec)
    assert meta.digest != meta.origin
    assert record.codec_ids == (CodecId[codec.upper()],) * 2
    bounds = [section.bound for section in meta.sections]
    assert all(largest_error(a, b) <= bound for a, b, bound in zip(out, sections, bounds, strict=True))
    assert Record.of(meta, record.data) == record


def test_every_level_has_its_steps_and_its_number_on_disk() -> None:
    ids = [CodecId[codec.upper()] for codec in LOSSY_CODECS]

    assert tuple(STEPS) == LOSSY_CODECS
    assert list(map(int, ids)) == [3, 4, 5, 6]


def test_a_record_of_which_nothing_was_lost_is_the_lossless_one() -> None:
    sections = [torch.zeros(2, 2, 32, 8), torch.ones(2, 2, 32, 8)]
    names = {"block_hash": BLOCK_HASH, "fingerprint": FINGERPRINT, "start": 0}

    record = pack(sections, codec="q4", **names)

    assert record == pack(sections, codec="lossless", **names)
    assert not read_meta(record.data).is_lossy


def test_a_section_that_cannot_be_quantised_is_exact_in_a_lossy_record() -> None:
    sections = [like_kv((2, 2, 32, 8)), like_kv((2, 2, 32, 8), seed=1)]
    sections[1][0, 0, 0, 0] = math.inf

    record = pack(sections, block_hash=BLOCK_HASH, fingerprint=FINGERPRINT, start=0, codec="q2")

    meta = read_meta(record.data)
    assert record.codec_ids == (CodecId.Q2, CodecId.PLANE)
    assert meta.sections[0].bound > 0 == meta.sections[1].bound
    assert meta.is_lossy


def test_lossless_records_are_of_version_1_and_lossy_ones_of_version_2() -> None:
    versions = [make_record(codec)[1].data[4] for codec in ("lossless", "raw", "q1", "q4")]

    assert versions == [1, 1, 2, 2]


def test_a_record_that_claims_a_smaller_bound_is_damage() -> None:
    sections, record = make_record()
    fields = [
        [list(section.shape), int(section.codec_id), section.sum, list(section.part_nbytes), section.bound / 2]
        for section in read_meta(record.data).sections
    ]

    with pytest.raises(CorruptionError, match=r"section 0: its values may be .* off"):
        unpack(with_meta(record.data, s=fields), [torch.empty_like(section) for section in sections])


@pytest.mark.parametrize("field", ["origin is missing", "origin is its own"])
def test_a_lossy_record_without_an_origin_is_damage(field: str) -> None:
    record = make_record()[1]
    origin = None if field == "origin is missing" else record.digest

    with pytest.raises(CorruptionError, match="metadata is damaged"):
        read_meta(with_meta(record.data, o=origin))


def test_lossy_records_decode_together_as_they_do_alone() -> None:
    made = [make_record() for _ in range(3)]
    together = [[torch.empty_like(section) for section in sections] for sections, _ in made]
    alone = [torch.empty_like(section) for section in made[0][0]]
    unpack(made[0][1].data, alone)

    found = unpack_many([record.data for _, record in made], together)

    assert found == [read_meta(record.data) for _, record in made]
    assert all(torch.equal(a, b) for out in together for a, b in zip(out, alone, strict=True))


def test_a_lossy_record_that_was_cut_into_parts_comes_back_as_the_same_block() -> None:
    sections, record = make_record("q1", num_tokens=64, num_layers=200)
    meta = read_meta(record.data)
    pieces = cut(record.data)

    joined = join(pieces.head, pieces.parts)
    out = [torch.empty_like(section) for section in sections]
    again = unpack(joined, out)

    assert num_parts(meta) == len(pieces.parts) > 1
    assert (again.digest, again.origin, again.is_lossy) == (meta.digest, meta.origin, True)
    assert [section.bound for section in again.sections] == [section.bound for section in meta.sections]
