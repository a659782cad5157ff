"""The path of KV to disk and back, by parts: what limits saving and resuming.

    python benchmarks/path.py [--quick] [--contexts N ...]

Real blocks (64 of 64 tokens: 4,096) go down, segment to record to LMDB, and up, back into a segment, as in `checkpoint`
and `resume`, on 1 and 2 threads. Then each part runs alone on one thread: joining a record's chunks out of LMDB's map,
zstd, the merge of its parts, the checksums; and a load into memory that was never touched, which adds its page faults.
MB/s are of KV; "per core" counts CPU time of the whole process.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import MB, Options, Row, Times, base_store, check, main
from torch import Tensor

from agentmem._lmdb import Environment
from agentmem.ids import BlockDigest, Fingerprint
from agentmem.kv import codec, header, record
from agentmem.kv.scratch import SCRATCH
from agentmem.kv.spec import KVSpec, LayerGroup
from agentmem.stats import Counters
from agentmem.tiers.blocks import Want
from agentmem.tiers.blockstore import BlockStore
from agentmem.tiers.device import DeviceTier, empty_sections
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity

MAX_BLOCKS = 64
MIN_ENCODE_MB_PER_S = 600.0
MIN_DECODE_MB_PER_S = 1500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Blocks to move.

    Attributes:
        disk: Where they lie.
        metas: What their records say, in the order of their tokens.
        spec: Geometry of their KV.
    """

    disk: DiskTier
    metas: list[header.RecordMeta]
    spec: KVSpec

    @property
    def digests(self) -> list[BlockDigest]:
        """The blocks' names."""
        return [meta.digest for meta in self.metas]

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return len(self.metas) * self.spec.block_size

    @property
    def nbytes(self) -> int:
        """KV of all blocks."""
        return self.num_tokens * self.spec.token_nbytes

    def segment(self) -> list[Tensor]:
        """Return memory for all blocks as a session allocates it: untouched, on huge pages where there are any."""
        return DeviceTier(self.spec, torch.device("cpu"), None).allocate(self.num_tokens).sections

    def small_pages(self) -> list[Tensor]:
        """Return the same on pages of 4 KiB, for comparison."""
        maps = [
            mmap.mmap(-1, section.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for section in self.segment()
        ]
        shapes = self.spec.section_shapes(self.num_tokens)
        dtype = getattr(torch, self.spec.dtype)
        return [torch.frombuffer(memory, dtype=dtype).view(shape) for memory, shape in zip(maps, shapes, strict=True)]

    def slots(self, segment: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield each block's slice of a segment."""
        size = self.spec.block_size
        for index in range(len(self.metas)):
            yield [section[:, :, index * size : (index + 1) * size] for section in segment]


def run(options: Options) -> dict[str, object]:
    """Measure up, down and the parts."""
    environment = Environment.open(base_store(options), read_only=True)
    torch.set_num_threads(1)
    try:
        sample = choose_blocks(environment)
        repeats = options.repeats(full=9, quick=3)
        segment = sample.segment()
        up = [way_up(sample, segment, num_threads, repeats) for num_threads in (1, 2)]
        down = [way_down(sample, segment, num_threads, repeats, options.folder) for num_threads in (1, 2)]
        down += parts_of_the_way_down(sample, segment, repeats, options.folder)
        up += parts_of_the_way_up(sample, segment, repeats)
    finally:
        environment.close()
    whole = next(row for row in down if "the whole record" in str(row["what"]))
    return {
        "benchmark": "path",
        "what": f"{len(sample.metas)} blocks, {sample.nbytes / MB:.0f} MB of KV",
        "rows": [*down, *up],
        "checks": [
            check("block to record, MB/s per core", whole["MB/s per core"], MIN_ENCODE_MB_PER_S, is_at_least=True),
            check("up on 2 threads, MB/s", up[1]["MB/s"], MIN_DECODE_MB_PER_S, is_at_least=True),
        ],
    }


def choose_blocks(environment: Environment) -> Sample:
    """Return the first full blocks of the base store, which all its sessions share."""
    disk = DiskTier(environment)
    with environment.read() as txn:
        digests = [digest for digest, _ in disk.iter_index(txn)]
    metas = [record.read_meta(disk.load_record(digest)) for digest in digests]
    size = max(meta.num_tokens for meta in metas)
    metas = sorted((meta for meta in metas if meta.num_tokens == size), key=lambda meta: meta.start)[:MAX_BLOCKS]
    keys, values = (section.shape for section in metas[0].sections)
    group = LayerGroup(num_layers=keys[0], num_heads=keys[1], key_dim=keys[3], value_dim=values[3])
    return Sample(
        disk=disk, metas=metas, spec=KVSpec(layers=(), groups=(group,), dtype=metas[0].dtype, block_size=size)
    )


def way_up(sample: Sample, segment: list[Tensor], num_threads: int, repeats: int) -> Row:
    """Load all blocks into a segment, as `resume` does."""
    store = block_store(sample, sample.disk, num_threads)

    def load() -> None:
        wants = [
            Want(
                block=store.known(meta.block_hash, meta.start, meta.start + meta.num_tokens, meta.digest),
                out=out,
                num_tokens=meta.num_tokens,
            )
            for meta, out in zip(sample.metas, sample.slots(segment), strict=True)
        ]
        if len(store.load(wants).blocks) != len(wants):
            raise RuntimeError("a block of the sample could not be loaded")

    row = rate(f"up: LMDB to segment, {num_threads} threads", sample, load, repeats)
    store.close()
    return row


def way_down(sample: Sample, segment: list[Tensor], num_threads: int, repeats: int, folder: Path) -> Row:
    """Copy blocks out of a segment, pack them and commit them to a new store, as saving does; fsync at the end."""
    times = Times()
    for number in range(repeats + 1):
        save_all(sample, segment, num_threads, folder, times if number else Times())
    return row_of(f"down: segment to LMDB, fsync, {num_threads} threads", sample, times)


def save_all(sample: Sample, segment: list[Tensor], num_threads: int, folder: Path, times: Times) -> None:
    """Save all blocks to a new store, on several threads."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        environment = Environment.open(Path(place) / "store", create=True)
        disk = DiskTier(environment)

        def save_one(pair: tuple[header.RecordMeta, list[Tensor]]) -> None:
            save(sample, disk, *pair)

        with times.run(), ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(save_one, zip(sample.metas, sample.slots(segment), strict=True)))
            environment.flush()
        environment.close()


def save(sample: Sample, disk: DiskTier, meta: header.RecordMeta, slots: list[Tensor]) -> None:
    """Save one block as the mover does."""
    disk.store([pack(meta, gather(sample, slots))])


def gather(sample: Sample, slots: list[Tensor]) -> list[Tensor]:
    """Copy a block out of its segment."""
    sections = empty_sections(sample.spec, slots[0].shape[2])
    for target, source in zip(sections, slots, strict=True):
        target.copy_(source)
    return sections


def pack(meta: header.RecordMeta, sections: list[Tensor]) -> record.Record:
    """Make a block's record."""
    return record.pack(sections, block_hash=meta.block_hash, fingerprint=Fingerprint(bytes(32)), start=meta.start)


def parts_of_the_way_down(sample: Sample, segment: list[Tensor], repeats: int, folder: Path) -> list[Row]:
    """Time each part alone, over all blocks; the write on LMDB's own thread, the others on one."""
    blocks = [gather(sample, slots) for slots in sample.slots(segment)]
    records = [pack(meta, sections) for meta, sections in zip(sample.metas, blocks, strict=True)]
    write = Times()
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            environment = Environment.open(Path(place) / "store", create=True)
            with write.run():
                DiskTier(environment).store(records)
                environment.flush()
            environment.close()
    return [
        rate("  part: gather", sample, lambda: [gather(sample, slots) for slots in sample.slots(segment)], repeats),
        rate("  part: checksums of KV", sample, lambda: [record.section_sums(block) for block in blocks], repeats),
        rate("  part: split + zstd", sample, lambda: [encode(block) for block in blocks], repeats),
        rate("  the whole record", sample, lambda: list(map(pack, sample.metas, blocks)), repeats),
        row_of("  part: checksum of record, LMDB, fsync", sample, write),
    ]


def encode(sections: list[Tensor]) -> None:
    """Code a block's sections."""
    for section in sections:
        codec.encode_section(section, "lossless")


def parts_of_the_way_up(sample: Sample, segment: list[Tensor], repeats: int) -> list[Row]:
    """Time each part alone, on one thread, over all blocks."""
    slots = list(sample.slots(segment))
    records = [sample.disk.load_record(digest) for digest in sample.digests]
    coded = [split_record(data) for data in records]

    def each(call: Callable[..., object], *lists: list) -> Callable[[], None]:
        def loop() -> None:
            for arguments in zip(*lists, strict=True):
                call(*arguments)

        return loop

    def decode(sections: list[tuple[int, list[memoryview]]], out: list[Tensor]) -> None:
        for (codec_id, parts), target in zip(sections, out, strict=True):
            codec.decode_section(codec_id, parts, target)

    join = sample.disk._join_into_scratch  # noqa: SLF001 - a part of `load` that cannot be called otherwise
    return [
        rate("  part: join chunks of LMDB", sample, each(join, sample.digests), repeats),
        rate(
            "  part: record metadata", sample, each(header.unpack_meta, [memoryview(data) for data in records]), repeats
        ),
        rate("  part: zstd", sample, each(unzip, coded), repeats),
        rate("  part: zstd + merge into place", sample, each(decode, coded, slots), repeats),
        rate("  part: checksums", sample, each(record.section_sums, slots), repeats),
        rate("  all of a block's load, 1 thread", sample, each(sample.disk.load, sample.digests, slots), repeats),
        rate("  the same into untouched memory", sample, lambda: load_into(sample, sample.segment()), repeats),
        rate("  the same on 4 KiB pages", sample, lambda: load_into(sample, sample.small_pages()), repeats),
    ]


def split_record(data: bytes) -> list[tuple[int, list[memoryview]]]:
    """Return each section's codec and parts."""
    meta, payload = header.unpack_meta(memoryview(data))
    layout, _ = header.payload_layout(meta)
    return [
        (section.codec_id, [payload[part] for part in parts])
        for section, parts in zip(meta.sections, layout, strict=True)
    ]


def unzip(sections: list[tuple[int, list[memoryview]]]) -> None:
    """Decompress the zstd frames of a record: two of five parts of each band."""
    for codec_id, parts in sections:
        if codec_id != codec.CodecId.NIB:
            raise RuntimeError(f"a block of the sample is not coded with nib but with {codec_id}")
        for first in range(0, len(parts), 5):
            for part in parts[first : first + 2]:
                SCRATCH.decompressor.decompress(part)


def load_into(sample: Sample, segment: list[Tensor]) -> None:
    """Load all blocks into a segment."""
    for digest, out in zip(sample.digests, sample.slots(segment), strict=True):
        sample.disk.load(digest, out)


def block_store(sample: Sample, disk: DiskTier, num_threads: int) -> BlockStore:
    """Return the door of the data plane over a disk tier alone."""
    return BlockStore(
        spec=sample.spec,
        identity=Identity(sample.metas[0].fingerprint, b""),
        host=HostTier(0),
        disk=disk,
        codec="lossless",
        num_threads=num_threads,
        is_saving=False,
        counters=Counters(),
    )


def rate(what: str, sample: Sample, call: Callable[[], object], repeats: int) -> Row:
    """Time a call over all blocks, after one to get warm."""
    call()
    times = Times()
    for _ in range(repeats):
        with times.run():
            call()
    return row_of(what, sample, times)


def row_of(what: str, sample: Sample, times: Times) -> Row:
    """Return one line of the table."""
    return {
        "what": what,
        **times.columns("ms", 1e3),
        "MB/s": sample.nbytes / MB / times.median,
        "CPU ms": times.cpu * 1e3,
        "MB/s per core": sample.nbytes / MB / times.cpu,
    }


if __name__ == "__main__":
    main(run)
