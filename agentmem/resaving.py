"""What a checkpoint is about to name, and gc of another process took because nobody had named it yet.

It is saved again from the device or the host tier; KV that is in neither is forgotten, and computed again from the
tokens when it is next needed. Knows nothing of records and transactions.
"""

import logging
from collections.abc import Iterable

from torch import Tensor

from agentmem.ids import BlockDigest, BlockHash, short
from agentmem.kv import record as record_format
from agentmem.reasons import Reason
from agentmem.restoring import Restoring
from agentmem.runtime import Runtime
from agentmem.tiers.blockstore import SealedBlock
from agentmem.tiers.device import empty_sections
from agentmem.tiers.states import LayerState

logger = logging.getLogger(__name__)


class Resaving:
    """Saves again what a state has and the disk lacks. It looks at one state after the other, each once."""

    def __init__(self, runtime: Runtime) -> None:
        """Work on the tiers of `runtime`."""
        self._runtime = runtime

    def resave(self, state: Restoring) -> None:
        """Make what the state says of its KV true again.

        Raises:
            StorageFullError: The disk has no room.
            ReadOnlyError: The store cannot be written.
        """
        for block in state.saved_blocks():
            if self._is_gone(block.digest) and not self._save_block(state, block):
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
            if any(self._is_gone(digest) for digest in layer_state.digests or ()):
                self._save_state(layer_state)
        self._save_media(state)

    def _is_gone(self, digest: BlockDigest | None) -> bool:
        return digest is not None and not self._runtime.blocks.disk.contains(digest)

    def _save_block(self, state: Restoring, block: SealedBlock) -> bool:
        """Store a block again; False when its KV is in no tier."""
        if block.source is not None:
            return True  # its own saving is not over
        sections: list[Tensor] | None = None
        if block.stop <= state.cursor.length:
            sections = empty_sections(state.spec, block.num_tokens)
            state.workspace.gather(state.cursor, block.start, block.stop, sections)
        elif block.digest is not None:
            sections = self._runtime.blocks.host.fetch(block.digest)
        if sections is not None:
            self._store(sections, block.block_hash, block.start, block.num_tokens)
        return sections is not None

    def _save_state(self, layer_state: LayerState) -> None:
        states = self._runtime.states
        logger.info("the layer state after %d tokens is saved again", layer_state.position)
        if layer_state.tensors is None:
            states.forget(layer_state)  # the model goes on from an earlier one
            return
        layer_state.digests = None
        states.save(layer_state)
        for stored in layer_state.stored:
            stored.result()

    def _save_media(self, state: Restoring) -> None:
        for mark in state.marks:
            if mark.payload is None or not self._is_gone(mark.payload):
                continue
            sections = self._runtime.blocks.host.fetch(mark.payload)
            if sections is None:
                logger.error("branch %s: the input at token %d is in no tier any more", state.name, mark.start)
            else:
                self._store(sections, self._runtime.identity.media_name(mark.digest), 0, None)

    def _store(self, sections: Iterable[Tensor], block_hash: BlockHash, start: int, num_tokens: int | None) -> None:
        record = record_format.pack(
            list(sections),
            block_hash=block_hash,
            fingerprint=self._runtime.identity.fingerprint,
            start=start,
            codec=self._runtime.config.codec,
            num_tokens=num_tokens,
        )
        logger.info("block %s is saved again", short(record.digest))
        self._runtime.counters.add("blocks_saved_again")
        self._runtime.blocks.disk.store([record]).result()
