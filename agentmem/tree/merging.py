"""What becomes of a checkpoint that retention does not keep: another record of the same tokens, with less KV.

Pure functions over records: no token is ever lost. Knows nothing of storage, nor of what is kept.

    parent  [tokens 0 ...... 100)  blocks 0, tail of 36      joined into its only child:
    child   [tokens 100 .... 200)  blocks 1, 2, tail of 8        [tokens 0 ... 200)  blocks 0, 1, 2, tail of 8
"""

import dataclasses

from agentmem.tree.checkpoint import Checkpoint


def can_join(parent: Checkpoint, child: Checkpoint) -> bool:
    """Say whether `child` can take over the tokens of `parent` and still name all of its own KV."""
    is_alike = (parent.has_kv, parent.fingerprint, parent.regime) == (child.has_kv, child.fingerprint, child.regime)
    return is_alike and child.first_block <= parent.first_block + len(parent.blocks)


def joined(parent: Checkpoint, child: Checkpoint) -> Checkpoint:
    """Return `child` as it is when its parent is no more: it has the tokens, marks and blocks of both.

    The parent's tail and its layer states go, but for the encoder's output, which belongs to the root.
    """
    kept = max(child.first_block - parent.first_block, 0)
    return dataclasses.replace(
        child,
        parent_id=parent.parent_id,
        tokens=parent.tokens + child.tokens,
        first_block=min(parent.first_block, child.first_block),
        blocks=parent.blocks[:kept] + child.blocks,
        states=tuple(state for state in parent.states if state.position == 0) + child.states,
        marks=parent.marks + child.marks,
    )


def thinned(checkpoint: Checkpoint, block_size: int) -> Checkpoint:
    """Return a checkpoint with the KV that only it needs gone: its tail and its layer states.

    Its tokens after the last full block count as not fed, so that whoever goes on from it computes them again.
    """
    num_stored = (checkpoint.first_block + len(checkpoint.blocks)) * block_size
    num_fed = checkpoint.num_tokens - checkpoint.num_pending
    return dataclasses.replace(
        checkpoint,
        tail=None,
        states=tuple(state for state in checkpoint.states if state.position == 0),
        num_pending=checkpoint.num_tokens - min(num_stored, num_fed) if checkpoint.has_kv else checkpoint.num_pending,
    )
