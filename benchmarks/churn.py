"""Does writing get dearer as a store ages? 20 rounds that delete half of the blocks and write as much again.

    python benchmarks/churn.py [--quick]

Records of 64 KB to 2 MB (log-uniform, incompressible) go through the disk tier as blocks do, without a model. Measured
are CPU seconds of the process per GB written, removals and syncs included. What an aged LMDB store must not do is
search its free list longer and longer (docs/decisions/003).
"""

import random
import secrets
import statistics
import time

from harness import MB, Options, Row, check, main

from agentmem._lmdb import Environment, Level
from agentmem.gc import compact
from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv.codec import CodecId
from agentmem.kv.record import Record
from agentmem.tiers.disk import DiskTier

NUM_ROUNDS = 20
LIVE_NBYTES = 256 << 20
SIZES = (64 << 10, 2 << 20)
MAX_GROWTH = 1.5
MAX_FILE_PER_LIVE = 1.2
GROUP_NBYTES = 16 << 20
FAR_AHEAD_S = float(1 << 33)


def run(options: Options) -> dict[str, object]:
    """Fill a store, and let it age."""
    live_nbytes = LIVE_NBYTES // options.repeats(full=1, quick=4)
    path = options.folder / "churn"
    rng, noise = random.Random(0), secrets.token_bytes(SIZES[1])
    rows: list[Row] = []
    with Environment.open(path, create=True) as environment:
        disk = DiskTier(environment)
        live = write(disk, rng, noise, live_nbytes)
        for number in range(NUM_ROUNDS):
            wall, cpu = time.perf_counter(), time.process_time()
            rng.shuffle(live)
            gone, live = live[: len(live) // 2], live[len(live) // 2 :]
            remove(environment, disk, gone)
            fresh = write(disk, rng, noise, sum(record_nbytes for _, record_nbytes in gone))
            written_gb = sum(nbytes for _, nbytes in fresh) / 1e9
            live += fresh
            rows.append(
                {
                    "round": number + 1,
                    "CPU s/GB": (time.process_time() - cpu) / written_gb,
                    "MB/s": written_gb * 1e3 / (time.perf_counter() - wall),
                    "live MB": environment.live_nbytes / MB,
                    "file / live": environment.nbytes / environment.live_nbytes,
                }
            )
    after = compact(path)
    with Environment.open(path) as environment:
        compacted = environment.nbytes / environment.live_nbytes
    first, last = (statistics.median(row["CPU s/GB"] for row in part) for part in (rows[:5], rows[-5:]))
    return {
        "benchmark": "churn",
        "what": f"{live_nbytes / MB:,.0f} MB live, half of it deleted and written again in each round",
        "rows": rows,
        "compacted_nbytes": after.after_nbytes,
        "checks": [
            check("CPU per GB, last 5 rounds / first 5", last / first, MAX_GROWTH),
            check("file / live bytes at the end", rows[-1]["file / live"], MAX_FILE_PER_LIVE),
            check("file / live bytes after compact", compacted, MAX_FILE_PER_LIVE),
        ],
    }


def write(disk: DiskTier, rng: random.Random, noise: bytes, nbytes: int) -> list[tuple[BlockDigest, int]]:
    """Write new records of about `nbytes` in all, durably; return their names and sizes."""
    written: list[tuple[BlockDigest, int]] = []
    pending = []
    while sum(size for _, size in written) < nbytes:
        size = int(SIZES[0] * (SIZES[1] / SIZES[0]) ** rng.random())
        name = rng.randbytes(32)
        written.append((BlockDigest(name), size))
        record = Record(
            digest=BlockDigest(name),
            block_hash=BlockHash(name),
            data=noise[:size],
            raw_nbytes=size,
            num_tokens=1,
            codec_ids=(CodecId.RAW,),
        )
        pending.append(disk.store([record], level=Level.RELAXED))
    for future in pending:
        future.result()
    return written


def remove(environment: Environment, disk: DiskTier, gone: list[tuple[BlockDigest, int]]) -> None:
    """Remove blocks, as gc does: some megabytes an operation."""
    digests = [digest for digest, _ in gone]
    num_removed = 1
    while num_removed:
        num_removed, _ = environment.submit(
            lambda txn: disk.remove_unreferenced(txn, FAR_AHEAD_S, GROUP_NBYTES, among=digests)
        ).result()


if __name__ == "__main__":
    main(run)
