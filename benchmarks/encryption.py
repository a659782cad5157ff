"""What encryption at rest costs: records on their way to and from the disk, and the verbs of a session.

    python benchmarks/encryption.py [--quick] [--contexts N ...]

Records are real ones, of 64 tokens: encoding and decoding beside sealing and opening, in CPU time. Verbs run on two
stores that differ in nothing else, in turn, on the shortest context: the KV of 64 new tokens saved by a checkpoint, a
fork, and a resume with the page cache warm.
"""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import MB, Options, Row, Times, base_store, check, load_model, main, read_tokens, time_calls

import agentmem
from agentmem._lmdb import Cipher, Environment
from agentmem.kv import record
from agentmem.store import Store
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.sealing import opened, sealed

NUM_RECORDS = 8
MAX_SHARE = 0.15
MAX_CHECKPOINT = 1.10
CODECS = ("lossless", "raw")


def run(options: Options) -> dict[str, object]:
    """Measure records and verbs."""
    records = [row for codec in CODECS for row in measure_records(options, codec)]
    verbs = measure_verbs(options)
    shares = {row["what"]: row["encrypted / plain"] - 1 for row in records}
    return {
        "benchmark": "encryption",
        "what": "AES-256-GCM at rest, beside the same without",
        "rows": [*records, *verbs],
        "checks": [
            check("sealing / encoding, CPU", shares["encode, lossless"], MAX_SHARE),
            check("checkpoint, encrypted / plain", verbs[0]["encrypted / plain"], MAX_CHECKPOINT),
        ],
    }


def measure_records(options: Options, codec: str) -> list[Row]:
    """Time both ways of some blocks, one thread."""
    torch.set_num_threads(1)
    cipher, repeats = Cipher(secrets.token_bytes(32)), options.repeats(full=15, quick=5)
    with Environment.open(base_store(options), read_only=True) as environment, environment.read() as txn:
        disk = DiskTier(environment)
        digests = [digest for digest, _ in disk.iter_index(txn)][:NUM_RECORDS]
        stored = [disk.load_record(digest) for digest in digests]
    metas = [record.read_meta(data) for data in stored]
    blocks = [[torch.empty(each.shape, dtype=getattr(torch, meta.dtype)) for each in meta.sections] for meta in metas]
    for data, sections in zip(stored, blocks, strict=True):
        record.unpack(data, sections)

    def encode(seal_with: Cipher | None) -> Iterator[record.Record]:
        for meta, sections in zip(metas, blocks, strict=True):
            names = {"block_hash": meta.block_hash, "fingerprint": meta.fingerprint, "start": meta.start}
            yield sealed(seal_with, record.pack(sections, codec=codec, **names))

    def encode_all(seal_with: Cipher | None) -> None:
        for _ in encode(seal_with):
            pass  # nothing is kept, so that memory is used again, as it is when the writer keeps up

    packed, boxes = list(encode(None)), list(encode(cipher))

    def decode(*, is_boxed: bool) -> None:
        for each, sections in zip(boxes if is_boxed else packed, blocks, strict=True):
            record.unpack(opened(cipher if is_boxed else None, each.digest, memoryview(each.data)), sections)

    raw_nbytes = sum(each.raw_nbytes for each in packed)
    return [
        compare(
            f"encode, {codec}",
            time_calls(lambda: encode_all(None), repeats).cpu_s,
            time_calls(lambda: encode_all(cipher), repeats).cpu_s,
            raw_nbytes,
        ),
        compare(
            f"decode, {codec}",
            time_calls(lambda: decode(is_boxed=False), repeats).cpu_s,
            time_calls(lambda: decode(is_boxed=True), repeats).cpu_s,
            raw_nbytes,
        ),
    ]


def measure_verbs(options: Options) -> list[Row]:
    """Time verbs on both stores in turn."""
    num_tokens, num_rounds = min(options.contexts), options.repeats(full=15, quick=5)
    _, tokenizer = load_model(options)
    tokens = read_tokens(tokenizer, num_tokens + 64 * num_rounds)
    times: dict[tuple[str, bool], Times] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        for part in range(num_rounds):
            for is_encrypted in (False, True):
                with opened_store(folder / str(is_encrypted), options, is_encrypted=is_encrypted) as store:
                    first = num_tokens + 64 * part
                    measure_round(store, tokens[:num_tokens], tokens[first : first + 64], times, is_encrypted)
    names = ("checkpoint of 64 tokens", "fork", "resume")
    return [compare(name, times[name, False].wall_s, times[name, True].wall_s, 0) for name in names]


@contextlib.contextmanager
def opened_store(path: Path, options: Options, *, is_encrypted: bool) -> Iterator[Store]:
    """Open one of the two stores with the model."""
    model, tokenizer = load_model(options)
    config = agentmem.Config(encryption_key=bytes(32) if is_encrypted else None, save_in_background=False)
    with agentmem.open(path, model=model, tokenizer=tokenizer, config=config) as store:
        yield store


def measure_round(
    store: Store, trunk: list[int], tokens: list[int], times: dict[tuple[str, bool], Times], is_encrypted: bool
) -> None:
    """Go through one session's day."""
    is_new = not store.sessions()
    if is_new:
        session = store.create("session")
        session.append(trunk)
        session.forward()
        session.checkpoint()
    else:
        with times.setdefault(("resume", is_encrypted), Times()).run():
            session = store.resume("session")
    session.append(tokens)
    session.forward()
    with times.setdefault(("checkpoint of 64 tokens", is_encrypted), Times()).run():
        session.checkpoint()
    for number in range(20):
        with times.setdefault(("fork", is_encrypted), Times()).run():
            session.fork(f"b{len(session.branches)}-{number}")


def compare(what: str, plain_s: list[float], encrypted_s: list[float], nbytes: int) -> Row:
    """Return one line of the table; the ratio is of the medians."""
    plain, encrypted = sorted(plain_s)[len(plain_s) // 2], sorted(encrypted_s)[len(encrypted_s) // 2]
    return {
        "what": what,
        "plain ms": plain * 1e3,
        "encrypted ms": encrypted * 1e3,
        "encrypted / plain": encrypted / plain,
        "MB/s encrypted": nbytes / MB / encrypted if nbytes else None,
    }


if __name__ == "__main__":
    main(run)
