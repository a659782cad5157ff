"""The door of the data plane: seal a block, save it, find it, bring it back, wherever it is.

Knows blocks by their two names and runs of tokens on the device; knows nothing of sessions or of the model.
"""

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from agentmem._future import Future
from agentmem.errors import CorruptionError, NotFoundError, ReadOnlyError, SpecMismatchError, StorageFullError
from agentmem.ids import BlockDigest, BlockHash, short
from agentmem.kv import record as record_format
from agentmem.kv.spec import KVSpec
from agentmem.presence import taken_if_free
from agentmem.reasons import Reason
from agentmem.stats import Counters
from agentmem.tiers.backward import BackwardLoad
from agentmem.tiers.blocks import Loaded, Lossy, Outcome, SealedBlock, Want, copy_in
from agentmem.tiers.crew import Crew
from agentmem.tiers.device import Workspace, empty_sections
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity
from agentmem.tiers.layerstream import LayerStream
from agentmem.tiers.lower import LowerTiers
from agentmem.tiers.mover import AnyJob, Busy, Job, Mover
from agentmem.tiers.places import whereabouts
from agentmem.tiers.runs import Cursor

logger = logging.getLogger(__name__)

LOAD_TASK_NBYTES = 6 << 20
"""KV per task of a parallel load, decoded together: less does not scale over threads (docs/benchmarks.md)."""

_FOUND_AT_ONCE = 64
"""Blocks that a tier below is asked for by their tokens at once."""

_UNAVAILABLE = (NotFoundError, StorageFullError, ReadOnlyError)
"""Why a block cannot be had although nothing is damaged: it is gone, or it could not be saved for others to load."""


class BlockStore:
    """Blocks of one model over all tiers of one store."""

    def __init__(
        self,
        *,
        spec: KVSpec,
        identity: Identity,
        host: HostTier,
        disk: DiskTier,
        codec: str,
        num_threads: int,
        is_saving: bool,
        counters: Counters,
        lower: LowerTiers | None = None,
    ) -> None:
        """Join the tiers; `is_saving` lets the mover save blocks as they are sealed."""
        self.spec = spec
        self.host = host
        self.disk = disk
        self.lower = LowerTiers((), disk=disk, counters=counters) if lower is None else lower
        self._identity = identity
        self._codec = codec
        self._is_saving = is_saving
        self._counters = counters
        self._mover = Mover()
        self._crew = Crew(num_threads, "agentmem-load")
        self._num_threads = num_threads
        self._blocks_per_task = max(1, LOAD_TASK_NBYTES // max(1, spec.block_size * spec.token_nbytes))
        self._is_closed = False
        self._loads: list[BackwardLoad | LayerStream] = []
        self._known: weakref.WeakValueDictionary[BlockHash, SealedBlock] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def seal(
        self,
        workspace: Workspace,
        cursor: Cursor,
        start: int,
        stop: int,
        block_hash: BlockHash,
        *,
        is_parent_lossy: bool = False,
    ) -> SealedBlock:
        """Name the tokens [start, stop) of the cursor's path, and save them in the background.

        Copies nothing. The cursor's path up to `stop` stays on the device until the block is saved. `is_parent_lossy`
        says that KV up to `stop` came back from a lossy tier: no tier codes it lossily again.
        """
        block = SealedBlock(block_hash, start, stop, None)
        block.is_parent_lossy = is_parent_lossy
        block.source = (workspace, cursor.fork(stop))
        block.job = self._save_job(block)
        with self._lock:
            self._known.setdefault(block_hash, block)
        self._counters.add("blocks_sealed")
        if self._is_saving:
            self._mover.submit(block.job)
        return block

    def known(self, block_hash: BlockHash, start: int, stop: int, digest: BlockDigest) -> SealedBlock:
        """Return the block that a checkpoint names; it is on disk, unless it was lost."""
        return SealedBlock(block_hash, start, stop, digest)

    def find(self, block_hash: BlockHash, start: int, stop: int) -> SealedBlock | None:
        """Return a block of these tokens, computed by whomever, or None."""
        with self._lock:
            block = self._known.get(block_hash)
        if block is not None:
            return block
        digest = self.disk.find(block_hash)
        return None if digest is None else SealedBlock(block_hash, start, stop, digest)

    def find_run(self, names: Iterable[BlockHash], start: int, *, asks_lower: bool) -> list[SealedBlock]:
        """Return the leading blocks of a run of whole blocks from `start` on, as far as anybody has computed them.

        With `asks_lower` the tiers below the disk are asked for many at once, when nearer ones know no more.
        """
        size, found, left = self.spec.block_size, list[SealedBlock](), iter(names)
        for name in left:
            block = self.find(name, start + len(found) * size, start + (len(found) + 1) * size)
            if block is None:
                left = itertools.chain((name,), left)
                break
            found.append(block)
        while asks_lower and self.lower.tiers and (batch := list(itertools.islice(left, _FOUND_AT_ONCE))):
            for name, digest in zip(batch, self.lower.find_many(batch), strict=True):
                if digest is None:
                    return found
                at = start + len(found) * size
                found.append(SealedBlock(name, at, at + size, digest))
        return found

    def save(self, blocks: Sequence[SealedBlock]) -> None:
        """Hand the blocks to the disk's writer, in this thread where the mover has not done so.

        Afterwards each block has its digest, and a durable commit of the environment covers it.

        Raises:
            StorageFullError: The disk has no room.
            ReadOnlyError: The store cannot be written.
        """
        for block in blocks:
            if block.source is None or block.job is None:
                continue
            if _failure(block) is not None:
                block.job = self._save_job(block)
            block.job.run()

    def keep(self, blocks: Sequence[SealedBlock]) -> None:
        """Have the mover save blocks that nobody may hold any more by then, unless saving in the background is off."""
        for block in blocks if self._is_saving else ():
            job = block.job
            if job is not None:
                self._mover.submit(job, needs=block)

    def raise_failures(self, blocks: Sequence[SealedBlock]) -> None:
        """Raise the error for which one of the blocks did not reach the disk, if any; `save` may be tried again."""
        for block in blocks:
            failure = _failure(block)
            if failure is not None:
                raise failure

    def demote(self, blocks: Sequence[SealedBlock], workspace: Workspace, cursor: Cursor) -> None:
        """Copy saved blocks of the cursor's path from the device to the host tier, as far as its budget reaches."""
        for block in blocks:
            if block.digest is None or block.stop > cursor.length or self.host.contains(block.digest):
                continue  # what lies beyond the cursor is not on the device: it is on disk
            shapes = [(shape, getattr(torch, self.spec.dtype)) for shape in self.spec.section_shapes(block.num_tokens)]
            if not self.host.fill(block.digest, shapes, partial(workspace.gather, cursor, block.start, block.stop)):
                return
            self._counters.add("device_to_host_nbytes", block.num_tokens * self.spec.token_nbytes)

    def load(self, wanted: Sequence[Want]) -> Loaded:
        """Bring blocks onto the device, several threads at once, and verify every byte.

        Stops being useful at the first block that cannot be had: what lies after it in `wanted` is not counted.
        """
        outcomes: list[Outcome] = []
        for part in self._crew.do(self._load_run, self._tasks(wanted)):
            outcomes.extend(part)
        loaded = Loaded()
        for want, outcome in zip(wanted, outcomes, strict=True):
            if outcome.block is None:
                loaded.reason = outcome.reason
                break
            num_tokens = want.num_tokens
            loaded.blocks.append(outcome.block)
            loaded.from_tier[outcome.tier] = loaded.from_tier.get(outcome.tier, 0) + num_tokens
            loaded.nbytes += sum(section.nbytes for section in want.out)
            loaded.num_equivalent += num_tokens if outcome.reason is not Reason.COMPLETE else 0
            if outcome.codec:
                first = want.block.start + want.skip
                loaded.lossy.append(Lossy(first, first + num_tokens, outcome.codec))
        for tier, num_tokens in loaded.from_tier.items():
            self._counters.add(f"{tier}_to_device_nbytes", num_tokens * self.spec.token_nbytes)
        return loaded

    def load_backward(self, wanted: Sequence[Want]) -> BackwardLoad:
        """Begin to load blocks from the last one on; the caller computes them from the first one on meanwhile."""
        load = BackwardLoad(wanted, self._load_run)
        self._note_load(load)
        return load

    def stream(self, tier: str, wanted: Sequence[Want]) -> LayerStream | None:
        """Begin to load whole blocks from a tier, layer by layer; None when that is not possible."""
        load = self.lower.stream(tier, wanted, self.spec)
        if load is not None:
            self._note_load(load)
        return load

    def _note_load(self, load: BackwardLoad | LayerStream) -> None:
        self._loads = [each for each in self._loads if each.thread.is_alive()] + [load]

    def bring_near(self, blocks: Sequence[SealedBlock], is_over: Callable[[], bool]) -> int:
        """Copy blocks to host memory, as far as they are not nearer and its budget reaches; return how many came."""
        wanted = [block for block in blocks if block.digest is not None and block.source is None]
        num_blocks, is_full = 0, False
        for first in range(0, len(wanted), self._blocks_per_task):
            if is_full or is_over() or self._is_closed:
                break
            count, is_full = self._bring_some(wanted[first : first + self._blocks_per_task])
            num_blocks += count
        return num_blocks

    def _bring_some(self, blocks: Sequence[SealedBlock]) -> tuple[int, bool]:
        """Copy some blocks to host memory; return how many came, and whether it has no room for more."""
        wants = [
            Want(block=block, out=empty_sections(self.spec, block.num_tokens), num_tokens=block.num_tokens)
            for block in blocks
            if not self.host.contains(block.digest or BlockDigest(b""))
        ]
        count = 0
        for want, outcome in zip(wants, self._load_run(wants), strict=True):
            if outcome.codec or outcome.block is not want.block:
                continue  # gone, lossy or equivalent: it is not the bytes of that name
            if not self.host.store(want.block.digest or BlockDigest(b""), want.out):
                return count, True
            count += 1
            self._counters.add(f"{outcome.tier}_to_host_nbytes", sum(section.nbytes for section in want.out))
        return count, False

    def whereabouts(self, blocks: Sequence[SealedBlock]) -> list[str]:
        """Return the nearest tier that holds each block, "" for one that is in none."""
        return whereabouts(blocks, self.host, self.disk, self.lower)

    def flush(self, *, is_patient: bool = True) -> None:
        """Hand every sealed block to the disk's writer; without patience none whose workspace another thread uses."""
        self._mover.drain(is_patient=is_patient)

    def close(self) -> None:
        """Finish saving and end the threads."""
        self._is_closed = True
        self._mover.close()
        self._crew.close()
        for load in self._loads:
            load.stop()
            load.thread.join()
        self.lower.close()

    def _save_job(self, block: SealedBlock) -> AnyJob:
        """Make the job that saves a block; a block that nobody holds any more by then is not saved."""
        alive = weakref.ref(block)

        def fetch(is_patient: bool) -> list[Tensor] | None:
            still = alive()
            return None if still is None else self._gathered(still, is_patient=is_patient)

        def work(sections: list[Tensor]) -> None:
            still = alive()
            if still is not None and still.source is not None:
                self._save(still, sections)

        return Job(fetch, work)

    def _gathered(self, block: SealedBlock, *, is_patient: bool) -> list[Tensor] | None:
        """Copy a block's KV off the device; None when the disk has it."""
        source = block.source
        if source is None:
            return None
        workspace, cursor = source
        with contextlib.nullcontext(True) if is_patient else taken_if_free(workspace.lock) as is_free:
            if not is_free:
                raise Busy
            sections = empty_sections(self.spec, block.num_tokens)
            workspace.gather(cursor, block.start, block.stop, sections)
            return sections

    def _save(self, block: SealedBlock, sections: list[Tensor]) -> None:
        record = record_format.pack(
            sections,
            block_hash=block.block_hash,
            fingerprint=self._identity.fingerprint,
            start=block.start,
            codec=self._codec,
            num_tokens=block.num_tokens,
            is_parent_lossy=block.is_parent_lossy,
        )
        stored = self.disk.store([record])
        block.digest, block.stored = record.digest, stored
        stored.add_done_callback(lambda stored: _release_source(block, stored))
        self._counters.add("device_to_disk_nbytes", record.raw_nbytes)

    def _tasks(self, wanted: Sequence[Want]) -> list[Sequence[Want]]:
        """Cut the wanted blocks into runs of several megabytes, a few for each thread."""
        per_task = min(self._blocks_per_task, max(1, -(-len(wanted) // self._num_threads)))
        return [wanted[first : first + per_task] for first in range(0, len(wanted), per_task)]

    def _load_run(self, wanted: Sequence[Want]) -> list[Outcome]:
        """Load one task's blocks: those that come straight from the disk together, the others one by one.

        What is neither in RAM nor on disk comes from the tiers below, all of it at once.
        """
        together = [want for want in wanted if self._is_straight(want)]
        errors = self.disk.load_many(
            [want.block.digest for want in together if want.block.digest], [want.out for want in together]
        )
        good = {id(want) for want, error in zip(together, errors, strict=True) if error is None}
        outcomes = [
            Outcome(want.block, self.disk.name, Reason.COMPLETE) if id(want) in good else self._load_one(want)
            for want in wanted
        ]
        lost = [index for index, outcome in enumerate(outcomes) if outcome.block is None]
        for index, found in zip(lost, self.lower.load([wanted[index] for index in lost]), strict=True):
            if found.reason is not Reason.MISSING:
                outcomes[index] = found
        return outcomes

    def _is_straight(self, want: Want) -> bool:
        """Say whether a whole block can be decoded from its record on disk into where it is wanted."""
        block = want.block
        is_on_disk = block.digest is not None and block.stored is None and not self.host.contains(block.digest)
        return is_on_disk and want.num_tokens == block.num_tokens and want.is_on_cpu

    def _load_one(self, want: Want) -> Outcome:
        """Load one block: its own bytes, else those of an equivalent block."""
        try:
            return Outcome(want.block, self._fetch(want.block, want), Reason.COMPLETE)
        except _UNAVAILABLE:
            reason = Reason.MISSING
        except (CorruptionError, SpecMismatchError) as error:
            reason = self._note_damage(want.block)
            logger.warning("block %s is not used (%s): %s", short(want.block.block_hash), reason, error)
        digest = self.disk.find(want.block.block_hash)
        if digest is None or digest == want.block.digest:
            return Outcome(None, "", reason)
        other = SealedBlock(want.block.block_hash, want.block.start, want.block.stop, digest)
        try:
            return Outcome(other, self._fetch(other, want), reason)
        except _UNAVAILABLE:
            return Outcome(None, "", reason)
        except (CorruptionError, SpecMismatchError):
            self._note_damage(other)
            return Outcome(None, "", reason)

    def _fetch(self, block: SealedBlock, want: Want) -> str:
        """Copy one block's bytes to where they are wanted; return the tier that had them."""
        self.save([block])
        if block.digest is None:
            raise NotFoundError(f"block {short(block.block_hash)} was never saved")
        is_direct = want.num_tokens == block.num_tokens and want.is_on_cpu
        sections = want.out if is_direct else empty_sections(self.spec, block.num_tokens)
        tier = self.host.name if self.host.load(block.digest, sections) else self.disk.name
        if tier == self.disk.name:
            stored = block.stored
            if stored is not None:
                stored.result()
            self.disk.load(block.digest, sections)
        if not is_direct:
            copy_in(sections, want)
        return tier

    def _note_damage(self, block: SealedBlock) -> Reason:
        """Forget a block whose bytes are bad, so that computing it again writes it again."""
        self._counters.add("blocks_damaged")
        if block.digest is not None:
            self.host.remove(block.digest)
            self.disk.mark_damaged(block.digest)
        return Reason.DAMAGED


def _failure(block: SealedBlock) -> BaseException | None:
    return block.stored.exception() if block.stored is not None and block.stored.done() else None


def _release_source(block: SealedBlock, stored: "Future[None]") -> None:
    """Let the device forget a block that the disk has."""
    if stored.exception() is None:
        block.source = None
        block.stored = None
