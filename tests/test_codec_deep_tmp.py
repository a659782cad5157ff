"""The codec gives back every bit of every section, and takes damaged parts for what they are."""

import math

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentmem.errors import CorruptionError, InvalidInputError, SpecMismatchError
from agentmem.kv import nib, nib_torch
from agentmem.kv.codec import CodecId, as_words, decode_section, encode_section

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SPECIALS = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-40, -1e-40, 3e38])
shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 256), st.sampled_from([1, 2, 3, 5, 8, 64]))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any pattern of bits: NaNs with payloads, infinities, subnormals, both zeros."""
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def like_kv(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normal values around a mean and with a spread that differ by channel, as KV has them."""
    generator = torch.Generator().manual_seed(seed)
    channel = (shape[0], shape[1], 1, shape[3])
    mean, spread = torch.randn(channel, generator=generator), torch.randn(channel, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * spread + 2 * mean).to(dtype)


def with_specials(section: Tensor, seed: int) -> Tensor:
    """The same section with a few values of every special kind in it."""
    flat = section.clone().view(-1)
    where = torch.randint(flat.numel(), (len(SPECIALS),), generator=torch.Generator().manual_seed(seed))
    flat[where] = SPECIALS.to(section.dtype)
    return flat.view(section.shape)


def strided(shape: tuple[int, ...], dtype: torch.dtype, room: int) -> Tensor:
    """A slice along T of a larger segment, `room` tokens in."""
    num_layers, num_heads, num_tokens, dim = shape
    return torch.zeros(num_layers, num_heads, num_tokens + 2 * room, dim, dtype=dtype)[:, :, room : room + num_tokens]


def bits(section: Tensor) -> np.ndarray:
    return np.ascontiguousarray(as_words(section))


def is_same(left: Tensor, right: Tensor) -> bool:
    return np.array_equal(bits(left), bits(right))


def views(parts: list) -> list[memoryview]:
    return [memoryview(bytes(part)) for part in parts]


def round_trip(section: Tensor, codec: str = "lossless", room: int = 0) -> tuple[CodecId, Tensor]:
    codec_id, parts = encode_section(section, codec)
    out = strided(tuple(section.shape), section.dtype, room)
    decode_section(codec_id, views(parts), out)
    return codec_id, out


@settings(max_examples=1500, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 32),
    codec=st.sampled_from(["lossless", "raw"]),
)
def test_any_bits_of_any_dtype_come_back(shape: tuple, dtype: torch.dtype, seed: int, codec: str) -> None:
    section = random_bits(shape, dtype, seed)

    _, out = round_trip(section, codec)

    assert is_same(out, section)


@settings(max_examples=1500, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1 << 32), room=st.integers(0, 5))
@example(shape=(2, 2, 16, 8), dtype=torch.bfloat16, seed=0, room=3)
@example(shape=(2, 2, 256, 64), dtype=torch.bfloat16, seed=1, room=1)
def test_kv_with_special_values_comes_back_through_strided_views(
    shape: tuple, dtype: torch.dtype, seed: int, room: int
) -> None:
    source = strided(shape, dtype, room)
    source.copy_(with_specials(like_kv(shape, dtype, seed), seed))

    _, out = round_trip(source, room=room)

    assert is_same(out, source)


@pytest.mark.parametrize("num_tokens", range(1, 70))
def test_every_length_of_a_tail_comes_back(num_tokens: int) -> None:
    section = like_kv((3, 2, num_tokens, 16))

    codec_id, out = round_trip(section)

    assert is_same(out, section)
    assert (codec_id == CodecId.NIB) == (num_tokens >= 16)


def test_a_write_stays_inside_its_slice() -> None:
    segment = torch.full((2, 3, 40, 8), 7.0, dtype=torch.bfloat16)
    codec_id, parts = encode_section(like_kv((2, 3, 20, 8)), "lossless")

    decode_section(codec_id, views(parts), segment[:, :, 10:30])

    assert bool((segment[:, :, :10] == 7).all())
    assert bool((segment[:, :, 30:] == 7).all())


def test_layers_and_heads_may_have_any_order_in_memory() -> None:
    section = like_kv((3, 4, 32, 8)).permute(1, 0, 2, 3)
    out = torch.zeros(32, 8, 4, 3, dtype=torch.bfloat16).permute(2, 3, 0, 1)
    codec_id, parts = encode_section(section, "lossless")

    decode_section(codec_id, views(parts), out)

    assert codec_id == CodecId.NIB
    assert is_same(out, section)


def test_a_section_of_many_bands_comes_back() -> None:
    section = like_kv((10, 8, 256, 128))

    codec_id, parts = encode_section(section, "lossless")
    out = torch.empty_like(section)
    decode_section(codec_id, views(parts), out)

    assert len(parts) > 5
    assert is_same(out, section)


def test_kv_of_bfloat16_shrinks_by_a_third() -> None:
    section = like_kv((8, 4, 64, 64))

    _, parts = encode_section(section, "lossless")

    assert sum(len(bytes(part)) for part in parts) < section.nbytes / 1.4


def test_random_bits_are_stored_raw() -> None:
    section = random_bits((2, 2, 64, 16), torch.float32, 0)

    codec_id, parts = encode_section(section, "lossless")

    assert codec_id == CodecId.RAW
    assert sum(map(len, parts)) == section.nbytes


def test_values_that_rarely_fit_are_stored_as_byte_planes() -> None:
    section = like_kv((2, 2, 64, 16))
    section[:, :, ::8] *= 2.0**-40

    codec_id, out = round_trip(section)

    assert codec_id == CodecId.PLANE
    assert is_same(out, section)


@pytest.mark.parametrize("shape", [(2, 2, 64, 0), (0, 2, 64, 8), (1, 0, 3, 4)])
def test_a_section_without_values_comes_back(shape: tuple) -> None:
    section = torch.zeros(shape, dtype=torch.bfloat16)

    codec_id, out = round_trip(section)

    assert codec_id == CodecId.RAW
    assert out.shape == section.shape


def test_zeros_come_back_and_take_no_room_for_codes() -> None:
    section = torch.zeros(4, 2, 64, 32, dtype=torch.bfloat16)

    codec_id, out = round_trip(section)

    assert is_same(out, section)
    assert codec_id == CodecId.NIB


@pytest.mark.parametrize("codec", ["zstd", "", "LOSSLESS"])
def test_an_unknown_codec_is_refused_by_name(codec: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{codec}'"):
        encode_section(like_kv((1, 1, 16, 4)), codec)


@pytest.mark.parametrize("section", [torch.zeros(1, 1, 4, 4, dtype=torch.int8), torch.zeros(1, 4, 4)])
def test_what_is_no_kv_is_refused(section: Tensor) -> None:
    with pytest.raises(SpecMismatchError):
        encode_section(section, "lossless")


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="meta"):
        encode_section(torch.zeros(1, 1, 4, 4, device="meta"), "lossless")


@settings(max_examples=1500, deadline=None)
@given(shape=shapes, seed=st.integers(0, 1 << 32), is_random=st.booleans(), room=st.integers(0, 3))
def test_torch_and_numpy_split_alike(shape: tuple, seed: int, is_random: bool, room: int) -> None:
    section = strided(shape, torch.bfloat16, room)
    section.copy_(
        random_bits(shape, torch.bfloat16, seed) if is_random else with_specials(like_kv(shape, seed=seed), seed)
    )
    # copy_ may quieten NaNs, which is why both sides read the same section.

    in_numpy = nib.split(as_words(section)) if shape[2] >= 4 else None
    in_torch = nib_torch.pack_nib(section) if shape[2] >= 4 else None

    assert (in_numpy is None) == (in_torch is None)
    if in_numpy is not None and in_torch is not None:
        for name in ("base", "nibbles", "lows", "escape_value", "rest"):
            assert np.array_equal(getattr(in_numpy, name), getattr(in_torch, name).numpy().view(np.uint16)), name
        assert in_numpy.escape_index.tolist() == in_torch.escape_index.tolist()


@settings(max_examples=1500, deadline=None)
@given(shape=shapes.filter(lambda shape: shape[2] >= 4), seed=st.integers(0, 1 << 32))
def test_torch_merges_what_either_split(shape: tuple, seed: int) -> None:
    section = with_specials(like_kv(shape, seed=seed), seed)
    parts = nib_torch.pack_nib(section)
    out = strided(shape, torch.bfloat16, 2)

    if parts is not None:
        nib_torch.unpack_nib(parts, out)

    assert parts is None or is_same(out, section)


@pytest.mark.gpu
def test_a_gpu_splits_and_merges_as_the_cpu_does() -> None:
    section = with_specials(like_kv((4, 2, 67, 64)), 0)
    on_cpu = nib_torch.pack_nib(section)
    on_gpu = nib_torch.pack_nib(section.cuda())
    assert on_cpu is not None
    assert on_gpu is not None

    out = torch.zeros_like(section, device="cuda")
    nib_torch.unpack_nib(on_gpu, out)

    assert is_same(out.cpu(), section)
    for name in ("base", "nibbles", "lows", "escape_index", "escape_value", "rest"):
        assert torch.equal(getattr(on_gpu, name).cpu(), getattr(on_cpu, name))


def nib_section() -> tuple[Tensor, list[memoryview]]:
    section = with_specials(like_kv((4, 4, 65, 32)), 0)
    codec_id, parts = encode_section(section, "lossless")
    assert codec_id == CodecId.NIB
    return section, views(parts)


@pytest.mark.parametrize("number", range(5))
def test_a_part_of_the_wrong_length_is_damage(number: int) -> None:
    section, parts = nib_section()
    parts[number] = parts[number][:-1]

    with pytest.raises(CorruptionError):
        decode_section(CodecId.NIB, parts, torch.empty_like(section))


def test_a_missing_part_is_damage() -> None:
    section, parts = nib_section()

    with pytest.raises(CorruptionError, match="4 parts"):
        decode_section(CodecId.NIB, parts[:-1], torch.empty_like(section))


def test_an_escape_outside_the_section_is_damage() -> None:
    section, parts = nib_section()
    num_escapes = len(parts[3]) // 6
    parts[3] = memoryview(b"\xff" * (4 * num_escapes) + bytes(2 * num_escapes))

    with pytest.raises(CorruptionError, match="escape"):
        decode_section(CodecId.NIB, parts, torch.empty_like(section))


@pytest.mark.parametrize("number", [0, 1])
def test_a_frame_that_declares_a_huge_size_is_refused_before_it_is_decoded(number: int) -> None:
    section, parts = nib_section()
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))
    parts[number] = memoryview(bomb)

    with pytest.raises(CorruptionError, match="declares 67108864"):
        decode_section(CodecId.NIB, parts, torch.empty_like(section))


def test_a_frame_without_a_size_is_refused() -> None:
    section, parts = nib_section()
    data = zstandard.ZstdDecompressor().decompress(parts[1])
    parts[1] = memoryview(zstandard.ZstdCompressor(write_content_size=False).compress(data))

    with pytest.raises(CorruptionError, match="declares"):
        decode_section(CodecId.NIB, parts, torch.empty_like(section))


def test_a_codec_that_cannot_hold_the_dtype_is_damage() -> None:
    with pytest.raises(CorruptionError, match="8 bytes"):
        decode_section(CodecId.NIB, [memoryview(b"")] * 5, torch.zeros(1, 1, 16, 4, dtype=torch.float64))


@settings(max_examples=1500, deadline=None)
@given(parts=st.lists(st.binary(max_size=200), max_size=11), codec_id=st.sampled_from(CodecId))
def test_any_bytes_decode_or_are_damage(parts: list[bytes], codec_id: CodecId) -> None:
    out = torch.zeros(2, 1, 16, 2, dtype=torch.bfloat16)

    try:
        decode_section(codec_id, [memoryview(part) for part in parts], out)
    except CorruptionError as error:
        message = str(error)
    else:
        message = "decoded"

    assert message
