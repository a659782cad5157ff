"""A record gives back the block it was made of, or says what is wrong with it."""

import base64
import itertools
import struct
import threading

import msgpack
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentmem.errors import CorruptionError, FormatVersionError, InvalidInputError, SpecMismatchError
from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.codec import CodecId, as_words
from agentmem.kv.hashing import content_digest
from agentmem.kv.record import Record, RecordMeta, pack, read_meta, section_sums, unpack, unpack_many

BLOCK_HASH = BlockHash(b"h" * 32)
FINGERPRINT = Fingerprint(b"f" * 32)
SHAPES = [(3, 2, 20, 16), (3, 2, 20, 8)]

VERSION_1 = base64.b85decode(
    "K}}0S0RR91%K!iX5&!@IfCB&k00000>RjeV*1p;yhoNZ1AZTc4XlQ6?XlQ6?XlQ6?XlQ6?XlQ6?XlQ6?XlQ6?XrW}pAPcvJI}e)<yo%PY5!Qk!"
    "@^j+^&ND7KkwW~pW-I#gIiY66AZBJ}W@ct)W@ct)W@ct)W@ct)W@ct)W@ct)W@ct)W}$G*fT47#VrFb_VRSJzp>n5WWoBV@Y;>V>l9ZGI0ul%U"
    "#1P!!ij_ZD3-yt<+cOE1v?rA#Kg|IE7(kSi0Rj>T0>lv9;fj?%SPS)$w%aoale8z5BR|an02n|30000000000000000000000000D77#BARyHM"
    "0FWR!FgPGMFd#5EFgPGMFgPGM0stV3WW@*o00000D77#BAb_<200P7c5YVLqDFF%q=uDv$2~Yq)OG~)E<~6K}0a@jStf9(P)^H=N5d(RBl2sl8"
    "008*Iz||7~fPh%A0MMuq(D3vy@GxkYARs`Pkl=9K(9nQ*_+U`*fPh%A0MMuq(D3vy@GxkYARs`Pkl=9K(9nQ*_+U`*VDQx7pm6+XP|y&_pwM9a"
    "z+h1H_&@+4P>_fqkl5J3VDQx7pm6+XP|y&_pwM9az+h1H_&@+4P>_fqkl5J3VDQx7pm6+XP|y&_pwM9az+h1H_&@+4P>_fqkl5J3VDQx7pm6+X"
    "P|y&_pwM9az+h1H_&@+4P>_fqkl5J3ARs`Pkl=9K(9nQ*_+U`*fPh%A0MMuq(D3vy@GxkYARs`Pkl=9K(9nQ*_+U`*fPh%A0MMuq(D3vy@GxkY"
    "1ONa4L;wH)!~g&Q1OWg50000000000pudPeAivl@000y~AU}w|pg-Wg@IOF4AV5$*V86IOfW8Dkz&<QMfIl$5&_95^5I_(=kiVEe0Ke!z06rW*"
    "D77#BARyHM0FWR!FgPGMFd#5EFgPGMFgPGM0stV3WW@*o00000D77#BAb_<200P7c5YVLqDFF%q=uDv$2~Yq)OG~)E<~6K}0a@jStf9(P)^H=N"
    "5d(RBl2sl8008*Iz||7~fPh%A0MMuq(D3vy@GxkYARs`Pkl=9K(9nQ*_+U`*fPh%A0MMuq(D3vy@GxkYARs`Pkl=9K(9nQ*_+U`*VDQx7pm6+X"
    "P|y&_pwM9az+h1H_&@+4P>_fqkl5J3VDQx7pm6+XP|y&_pwM9az+h1H_&@+4P>_fqkl5J3VDQx7pm6+XP|y&_pwM9az+h1H_&@+4P>_fqkl5J3"
    "VDQx7pm6+XP|y&_pwM9az+h1H_&@+4P>_fqkl5J3ARs`Pkl=9K(9nQ*_+U`*fPh%A0MMuq(D3vy@GxkYARs`Pkl=9K(9nQ*_+U`*fPh%A0MMuq"
    "(D3vy@GxkY1ONa4L;wH)!~g&Q1OWg50000000000pudPeAivl@000y~AU}w|pg-Wg@IOF4AV5$*V86IOfW8Dkz&<QMfIl$5&_95^5I_(=kiVEe"
    "0Ke!z06rW*"
)
"""A record of `golden_section`, twice, as version 1 wrote it: later versions must read it."""


def make_sections(dtype: torch.dtype = torch.bfloat16, shapes: list = SHAPES) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n, shape in enumerate(shapes)]


def make_record(sections: list[Tensor], codec: str = "lossless") -> Record:
    return pack(
        sections, block_hash=BLOCK_HASH, fingerprint=FINGERPRINT, start=128, codec=codec, rope="default/theta=10000"
    )


def empty_like(sections: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(section) for section in sections]


def is_same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(np.array_equal(as_words(a), as_words(b)) for a, b in zip(left, right, strict=True))


def golden_section() -> Tensor:
    return ((torch.arange(2 * 18 * 8) * 37 % 64 - 20) / 16).view(1, 2, 18, 8).bfloat16()


def reseal(data: bytes, version: int = 1, flags: int = 0, **changes: object) -> bytes:
    """Change the metadata of a record as an attacker would: with a header checksum that fits."""
    body_nbytes, num_tokens, payload_nbytes = struct.unpack_from("<IIQ", data, 8)
    payload = data[len(data) - payload_nbytes :] if payload_nbytes else b""
    fields = msgpack.unpackb(data[32 : 32 + body_nbytes]) | changes
    body = msgpack.packb(fields)
    header = struct.pack("<4sBBHIIQ", b"AMKB", version, flags, 0, len(body), num_tokens, payload_nbytes)
    head = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + body)) + body
    return head.ljust(-(-len(head) // 64) * 64, b"\0") + payload


@pytest.mark.parametrize("codec", ["lossless", "raw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_block_comes_back(dtype: torch.dtype, codec: str) -> None:
    sections = make_sections(dtype)
    record = make_record(sections, codec)
    out = empty_like(sections)

    meta = unpack(record.data, out)

    assert is_same(out, sections)
    assert meta.digest == record.digest == content_digest(BLOCK_HASH, section_sums(sections))
    assert (meta.block_hash, meta.fingerprint, meta.start, meta.num_tokens) == (BLOCK_HASH, FINGERPRINT, 128, 20)
    assert (meta.dtype, meta.rope) == (str(dtype).removeprefix("torch."), "default/theta=10000")
    assert meta.raw_nbytes == record.raw_nbytes == sum(section.nbytes for section in sections)
    assert [section.codec_id for section in meta.sections] == list(record.codec_ids)
    assert not meta.is_lossy
    assert not meta.is_parent_lossy


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(1, 256), room=st.integers(0, 9), seed=st.integers(0, 1 << 32), is_random=st.booleans())
def test_slices_of_a_segment_pack_like_contiguous_sections(
    num_tokens: int, room: int, seed: int, is_random: bool
) -> None:
    rng = np.random.default_rng(seed)
    size = (2, 2, num_tokens + room + 1, 4)
    floats = torch.from_numpy(rng.standard_normal(size)).to(torch.bfloat16)
    noise = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, size, dtype=np.int16)).view(torch.bfloat16)
    segment = noise if is_random else floats
    section = segment[:, :, room : room + num_tokens]

    record = make_record([section, section])
    out = [torch.zeros_like(segment)[:, :, room : room + num_tokens] for _ in range(2)]
    unpack(record.data, out)

    assert record == make_record([section.contiguous(), section.contiguous()])
    assert is_same(out, [section, section])


def test_a_record_of_version_1_is_read() -> None:
    sections = [golden_section(), golden_section()]
    out = empty_like(sections)

    meta = unpack(VERSION_1, out)

    assert is_same(out, sections)
    assert meta.digest.hex() == "0bb7853b0f9b0ebc8ad6ae11d68229f273e304ce332e399142fcb7662bfaf239"
    assert [section.codec_id for section in meta.sections] == [CodecId.NIB, CodecId.NIB]


def test_metadata_is_read_without_decoding() -> None:
    sections = make_sections()
    record = make_record(sections)
    damaged = bytearray(record.data)
    damaged[-1] ^= 1

    meta = read_meta(bytes(damaged))

    assert meta.digest == record.digest
    assert [section.shape for section in meta.sections] == SHAPES
    assert meta.sums == section_sums(sections)


def test_a_record_may_lie_at_any_address() -> None:
    sections = make_sections()
    record = make_record(sections)
    out = empty_like(sections)

    unpack(memoryview(b"x" + record.data)[1:], out)

    assert is_same(out, sections)


def test_the_same_block_gives_the_same_bytes() -> None:
    assert make_record(make_sections()) == make_record(make_sections())


def test_the_digest_depends_on_every_section_and_on_the_tokens() -> None:
    sections = make_sections()
    changed = [sections[0], sections[1].clone()]
    changed[1].view(-1)[-1] += 1
    other_tokens = pack(sections, block_hash=BlockHash(b"i" * 32), fingerprint=FINGERPRINT, start=0)

    digests = {make_record(sections).digest, make_record(changed).digest, other_tokens.digest}

    assert len(digests) == 3


def test_negative_zero_is_another_block_than_zero() -> None:
    zeros = [torch.zeros(1, 1, 16, 4, dtype=torch.bfloat16)]

    assert make_record(zeros).digest != make_record([-zeros[0]]).digest


@pytest.mark.parametrize(
    ("dtype", "codec", "codec_ids"),
    [
        (torch.bfloat16, "lossless", (CodecId.NIB, CodecId.NIB)),
        (torch.float32, "lossless", (CodecId.PLANE, CodecId.PLANE)),
        (torch.bfloat16, "raw", (CodecId.RAW, CodecId.RAW)),
    ],
)
def test_every_flipped_bit_is_found_or_changes_nothing(dtype: torch.dtype, codec: str, codec_ids: tuple) -> None:
    sections = make_sections(dtype, shapes=[(1, 2, 34, 8), (1, 2, 34, 4)])
    record = make_record(sections, codec)
    data, meta = record.data, read_meta(record.data)
    out = empty_like(sections)
    undetected = []

    for position, bit in itertools.product(range(len(data)), range(8)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        try:
            if unpack(damaged, out) != meta or not is_same(out, sections):
                undetected.append((position, bit))
        except FormatVersionError:
            if position != 4:
                undetected.append((position, bit))
        except CorruptionError:
            pass

    assert undetected == []
    assert record.codec_ids == codec_ids


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 3000), junk=st.binary(max_size=20))
def test_a_record_of_another_length_is_damage(cut: int, junk: bytes) -> None:
    sections = make_sections()
    data = make_record(sections).data
    changed = data[: min(cut, len(data) - 1)] + junk

    if len(changed) != len(data):
        with pytest.raises(CorruptionError):
            unpack(changed, empty_like(sections))


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=300))
def test_any_bytes_are_damage(body: bytes) -> None:
    with pytest.raises(CorruptionError):
        read_meta(body)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=100))
def test_any_metadata_with_a_fitting_checksum_is_damage(body: bytes) -> None:
    header = struct.pack("<4sBBHIIQ", b"AMKB", 1, 0, 0, len(body), 20, 0)
    head = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + body)) + body
    data = head.ljust(-(-len(head) // 64) * 64, b"\0")

    with pytest.raises(CorruptionError):
        read_meta(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1 << 40) | st.binary(max_size=33) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from("hdfptrs"), value=values)
def test_a_forged_field_never_gives_another_block(key: str, value: object) -> None:
    sections = make_sections()
    forged = reseal(make_record(sections).data, **{key: value})
    out = empty_like(sections)

    try:
        unpack(forged, out)
    except (CorruptionError, FormatVersionError, SpecMismatchError):
        return

    # What a name or a number of the right kind says is the writer's word; the bytes still have their digest.
    assert key in "fpr"
    assert is_same(out, sections)


def test_the_untouched_record_survives_resealing() -> None:
    data = make_record(make_sections()).data

    assert reseal(data) == data


def test_a_declared_size_is_refused_before_anything_is_allocated() -> None:
    sections = make_sections()
    data = make_record(sections).data
    size = 1 << 31
    forged = reseal(data, s=[[[size, size, 20, size], 0, bytes(16), [1 << 60]]])

    with pytest.raises(CorruptionError, match="add up"):
        unpack(forged, empty_like(sections))


def test_a_zstd_bomb_is_refused_before_it_is_decoded() -> None:
    sections = [torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16)]
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))
    data = make_record(sections, "raw").data
    fields = msgpack.unpackb(data[32 : 32 + struct.unpack_from("<I", data, 8)[0]])
    shape, _, xxh3, _ = fields["s"][0]
    payload = bomb + bytes(-len(bomb) % 8) + b"abcd"
    header = bytearray(data[:64])
    struct.pack_into("<Q", header, 16, len(payload))
    forged = reseal(bytes(header[:32]) + data[32:-8] + payload, s=[[shape, 1, xxh3, [len(bomb), 4]]])

    with pytest.raises(CorruptionError, match="declares 67108864"):
        unpack(forged, empty_like(sections))


def test_an_unknown_version_is_named() -> None:
    data = reseal(make_record(make_sections()).data, version=3)

    with pytest.raises(FormatVersionError, match="version 3"):
        read_meta(data)


def test_an_unknown_codec_is_of_another_version() -> None:
    data = make_record(make_sections()).data
    fields = msgpack.unpackb(data[32 : 32 + struct.unpack_from("<I", data, 8)[0]])
    fields["s"][0][1] = 77

    with pytest.raises(FormatVersionError, match="codec 77"):
        read_meta(reseal(data, s=fields["s"]))


def test_flags_of_the_future_are_of_another_version() -> None:
    with pytest.raises(FormatVersionError, match="flags 0x80"):
        read_meta(reseal(make_record(make_sections()).data, flags=0x80))


@pytest.mark.parametrize(("flags", "is_lossy", "is_parent_lossy"), [(1, True, False), (2, False, True)])
def test_lossy_flags_are_read(flags: int, is_lossy: bool, is_parent_lossy: bool) -> None:
    meta = read_meta(reseal(make_record(make_sections()).data, flags=flags))

    assert (meta.is_lossy, meta.is_parent_lossy) == (is_lossy, is_parent_lossy)


def test_damage_names_the_block_and_the_section() -> None:
    sections = make_sections()
    record = make_record(sections, "raw")
    damaged = bytearray(record.data)
    damaged[-1] ^= 1

    with pytest.raises(CorruptionError, match=f"block {record.digest.hex()}: section 1: .*checksum"):
        unpack(damaged, empty_like(sections))


def test_sums_of_another_block_are_found_out() -> None:
    data = make_record(make_sections()).data
    forged = reseal(data, d=b"d" * 32)

    with pytest.raises(CorruptionError, match="do not give its digest"):
        unpack(forged, empty_like(make_sections()))


@pytest.mark.parametrize(
    "out",
    [
        make_sections(torch.float16),
        make_sections()[:1],
        [*make_sections(), make_sections()[0]],
        make_sections(shapes=[(3, 2, 21, 16), (3, 2, 21, 8)]),
        [section[0] for section in make_sections()],
    ],
    ids=["dtype", "too few", "too many", "tokens", "dimensions"],
)
def test_a_destination_that_does_not_fit_is_refused(out: list[Tensor]) -> None:
    data = make_record(make_sections()).data

    with pytest.raises(SpecMismatchError, match="to be decoded into"):
        unpack(data, out)


@pytest.mark.parametrize(
    "sections",
    [
        [make_sections()[0], make_sections(torch.float32)[1]],
        make_sections(shapes=[(1, 1, 4, 4), (1, 1, 5, 4)]),
        [torch.zeros(1, 4, 4)],
        [torch.zeros(1, 1, 4, 4, dtype=torch.int32)],
    ],
    ids=["dtypes", "tokens", "dimensions", "integers"],
)
def test_sections_that_make_no_block_are_refused(sections: list[Tensor]) -> None:
    with pytest.raises(SpecMismatchError):
        make_record(sections)


@pytest.mark.parametrize("sections", [[], [torch.zeros(1, 1, 0, 4)]], ids=["no section", "no token"])
def test_nothing_is_no_block(sections: list[Tensor]) -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        make_record(sections)


def test_threads_do_not_disturb_each_other() -> None:
    blocks = [make_sections(shapes=[(4, 2, 64, 32)] * 2), make_sections(shapes=[(2, 2, 48, 16)] * 2)]
    records = [make_record(sections) for sections in blocks]
    wrong = []

    def work(sections: list[Tensor], record: Record) -> None:
        out = empty_like(sections)
        for _ in range(50):
            unpack(record.data, out)
            if make_record(sections) != record or not is_same(out, sections):
                wrong.append(record.digest)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(blocks, records, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_codecs_are_chosen_section_by_section() -> None:
    noise = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 15), 1 << 15, (2, 2, 64, 16), dtype=np.int16))

    record = make_record([torch.randn(2, 2, 64, 16).bfloat16(), noise.view(torch.bfloat16)])

    assert record.codec_ids == (CodecId.NIB, CodecId.RAW)


def make_blocks(shapes: list, count: int = 4, dtype: torch.dtype = torch.bfloat16) -> list[list[Tensor]]:
    """Blocks of different values, each with a few that no base reaches."""
    generator = torch.Generator().manual_seed(7)
    blocks = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(count)]
    for number, block in enumerate(blocks):
        block[0].view(-1)[number * 3] = float("inf")
        block[1].view(-1)[-1 - number] = 1e-30
    return blocks


def same_bits(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(
        torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("num_tokens", [16, 64, 67])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_records_decoded_together_are_what_each_is_alone_in_strided_places(num_tokens, count):
    shapes = [(3, 2, num_tokens, 16), (3, 2, num_tokens, 8)]
    blocks = make_blocks(shapes, count)
    records = [make_record(block) for block in blocks]
    segments = [torch.zeros((3, 2, count * num_tokens, dim), dtype=torch.bfloat16) for dim in (16, 8)]
    places = [[segment[:, :, n * num_tokens : (n + 1) * num_tokens] for segment in segments] for n in range(count)]

    metas = unpack_many([record.data for record in records], places)

    assert all(isinstance(meta, RecordMeta) for meta in metas)
    assert [meta.digest for meta in metas] == [record.digest for record in records]
    assert all(same_bits(place, block) for place, block in zip(places, blocks, strict=True))


def test_a_damaged_record_among_several_is_named_and_the_others_are_decoded():
    blocks = make_blocks(SHAPES)
    records = [bytearray(make_record(block).data) for block in blocks]
    records[2][-40] ^= 1
    places = [empty_like(block) for block in blocks]

    metas = unpack_many(records, places)

    assert isinstance(metas[2], CorruptionError)
    assert all(same_bits(places[number], blocks[number]) for number in (0, 1, 3))


def test_records_of_different_lengths_codecs_and_dtypes_are_decoded_together():
    blocks = [make_blocks(SHAPES, 1)[0], make_blocks([(3, 2, 9, 16), (3, 2, 9, 8)], 1)[0], make_blocks(SHAPES, 1)[0]]
    records = [make_record(blocks[0]), make_record(blocks[1]), make_record(blocks[2], codec="raw")]
    places = [empty_like(block) for block in blocks]

    metas = unpack_many([record.data for record in records], places)

    assert all(isinstance(meta, RecordMeta) for meta in metas)
    assert all(same_bits(place, block) for place, block in zip(places, blocks, strict=True))


def test_no_records_decode_to_nothing():
    assert unpack_many([], []) == []
