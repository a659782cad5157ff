"""What a checkpoint is about to name, and gc of another process took because nobody had named it yet.

It is made ready to be stored in the very transaction that names it, from the device, the host tier or the disk; KV that
is in none of them is forgotten, and computed again from the tokens when it is next needed.
"""

import logging
from collections.abc import Iterable

from torch import Tensor

from agentmem.errors import CorruptionError, NotFoundError
from agentmem.ids import BlockDigest, BlockHash, short
from agentmem.kv import record as record_format
from agentmem.kv.record import Record
from agentmem.marks import lossy_marks
from agentmem.reasons import Reason
from agentmem.restoring import Restoring
from agentmem.runtime import Runtime
from agentmem.tiers.blocks import SealedBlock
from agentmem.tiers.device import empty_sections
from agentmem.tiers.states import LayerState

logger = logging.getLogger(__name__)


class Resaving:
    """Collects what a state has and nobody has named yet. It looks at one state after the other, each once.

    Attributes:
        records: What is to be stored in the transaction that names it: also what is on disk now, for others may take it
            before.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Work on the tiers of `runtime`."""
        self.records: dict[BlockDigest, Record] = {}
        self._runtime = runtime

    def collect(self, state: Restoring) -> None:
        """Add what the state alone knows of its KV; what cannot be had any more is forgotten by the state too."""
        for block in state.saved_blocks():
            if self._is_unnamed(block.digest) and not self._take_block(state, block):
                logger.warning(
                    "branch %s: KV from token %d on was removed before a checkpoint named it (%s)",
                    state.name,
                    block.start,
                    Reason.MISSING,
                )
                stop = state.num_computed
                state.truncate_kv(block.start)
                state.loss, state.lost_stop = Reason.MISSING, max(state.lost_stop, stop)
                break
        for layer_state in state.saved_states():
            if any(self._is_unnamed(digest) for digest in layer_state.digests or ()):
                self._take_state(layer_state)
        self._take_media(state)

    def _is_unnamed(self, digest: BlockDigest | None) -> bool:
        is_collected = digest is None or digest in self.records
        return not is_collected and not self._runtime.blocks.disk.is_named(BlockDigest(digest or b""))

    def _take_block(self, state: Restoring, block: SealedBlock) -> bool:
        """Collect a block; False when its KV is in no tier."""
        if block.source is not None:
            return True  # its own saving is not over
        is_lossy = bool(lossy_marks(state.marks, block.stop))
        if block.stop <= state.cursor.length:
            sections = empty_sections(state.spec, block.num_tokens)
            state.workspace.gather(state.cursor, block.start, block.stop, sections)
            self._take(sections, block.block_hash, block.start, block.num_tokens, is_lossy=is_lossy)
            return True
        return block.digest is None or self._take_stored(
            block.digest, block.block_hash, block.start, block.num_tokens, is_lossy=is_lossy
        )

    def _take_stored(
        self,
        digest: BlockDigest,
        block_hash: BlockHash,
        start: int,
        num_tokens: int | None,
        *,
        is_lossy: bool = False,
    ) -> bool:
        """Collect what the host tier has, or else the disk; False when neither has it."""
        sections = self._runtime.blocks.host.fetch(digest)
        if sections is not None:
            self._take(sections, block_hash, start, num_tokens, is_lossy=is_lossy)
            return True
        try:
            data = self._runtime.blocks.disk.load_record(digest)
        except (NotFoundError, CorruptionError):
            return False
        self.records[digest] = Record.of(record_format.read_meta(data), data)
        return True

    def _take_state(self, layer_state: LayerState) -> None:
        states = self._runtime.states
        if layer_state.tensors is not None:
            packed = states.pack(layer_state)
            layer_state.digests = tuple(record.digest for record in packed)
            self.records.update((record.digest, record) for record in packed)
        elif not all(
            self._take_stored(digest, layer_state.name or BlockHash(b""), layer_state.position, None)
            for digest in layer_state.digests or ()
        ):
            states.forget(layer_state)  # the model goes on from an earlier one

    def _take_media(self, state: Restoring) -> None:
        for mark in state.marks:
            if mark.payload is None or not self._is_unnamed(mark.payload):
                continue
            name = self._runtime.identity.media_name(mark.digest)
            if not self._take_stored(mark.payload, name, 0, None):
                logger.error("branch %s: the input at token %d is in no tier any more", state.name, mark.start)

    def _take(
        self, sections: Iterable[Tensor], block_hash: BlockHash, start: int, num_tokens: int | None, *, is_lossy: bool
    ) -> None:
        record = record_format.pack(
            list(sections),
            block_hash=block_hash,
            fingerprint=self._runtime.identity.fingerprint,
            start=start,
            codec=self._runtime.config.codec,
            num_tokens=num_tokens,
            is_parent_lossy=is_lossy,
        )
        logger.info("block %s is saved again", short(record.digest))
        self._runtime.counters.add("blocks_saved_again")
        self.records[record.digest] = record
