"""The checkpoints of one session as a tree, in memory.

The only file that knows networkx. Knows nothing of storage.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping

import networkx

from agentmem.errors import CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import CheckpointId, parse_prefix, short
from agentmem.tree.checkpoint import BlockRef, Checkpoint

_MAX_LISTED = 5
"""How many candidates a message lists."""


class SessionTree:
    """Checkpoints by id, and who continues whom.

    Walks are loops, never recursion: a session may be thousands of checkpoints deep. A checkpoint whose parent is not
    here (damaged on disk) stands as a root.
    """

    def __init__(self, checkpoints: Iterable[Checkpoint] = ()) -> None:
        """Take over `checkpoints`, in any order.

        Raises:
            CorruptionError: They form a ring.
        """
        self._checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in checkpoints}
        self._graph: networkx.DiGraph[CheckpointId] = networkx.DiGraph()
        self._graph.add_nodes_from(self._checkpoints)
        for checkpoint in self._checkpoints.values():
            self._connect(checkpoint)
        if not networkx.is_directed_acyclic_graph(self._graph):
            ring = networkx.find_cycle(self._graph)
            raise CorruptionError(f"checkpoints are their own ancestors: {', '.join(short(edge[0]) for edge in ring)}")

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __contains__(self, checkpoint_id: object) -> bool:
        return checkpoint_id in self._checkpoints

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._checkpoints.values())

    def get(self, checkpoint_id: CheckpointId) -> Checkpoint:
        """Return one checkpoint.

        Raises:
            NotFoundError: The session has no such checkpoint.
        """
        found = self._checkpoints.get(checkpoint_id)
        if found is None:
            raise NotFoundError(f"no checkpoint {checkpoint_id.hex()} among the session's {len(self)}")
        return found

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, or replace its record once its KV is attached. Costs the same for any size of tree.

        Raises:
            NotFoundError: Its parent is not here.
            InvalidInputError: It is here with another parent.
        """
        known = self._checkpoints.get(checkpoint.checkpoint_id)
        if known is not None and known.parent_id != checkpoint.parent_id:
            raise InvalidInputError(f"checkpoint {checkpoint.checkpoint_id.hex()} is here with another parent")
        if known is None and checkpoint.parent_id is not None:
            self.get(checkpoint.parent_id)
        self._checkpoints[checkpoint.checkpoint_id] = checkpoint
        self._graph.add_node(checkpoint.checkpoint_id)
        self._connect(checkpoint)

    def discard(self, checkpoint_id: CheckpointId) -> None:
        """Forget a checkpoint that gc removed. Its children, if any, stand as roots."""
        if self._checkpoints.pop(checkpoint_id, None) is not None:
            self._graph.remove_node(checkpoint_id)

    def merge(self, removed: Collection[CheckpointId], checkpoint: Checkpoint) -> None:
        """Let a checkpoint take the place of those that were merged into it, and of its own old record."""
        for each in (*removed, checkpoint.checkpoint_id):
            self._checkpoints.pop(each, None)
        children = list(self._graph.successors(checkpoint.checkpoint_id))
        self._graph.remove_nodes_from([*removed, checkpoint.checkpoint_id])
        self.add(checkpoint)
        self._graph.add_edges_from((checkpoint.checkpoint_id, child) for child in children)

    def roots(self) -> list[Checkpoint]:
        """Return the checkpoints without a parent here, oldest first."""
        return _by_age(self._checkpoints[node] for node, degree in self._graph.in_degree() if degree == 0)

    def children(self, checkpoint_id: CheckpointId) -> list[Checkpoint]:
        """Return the checkpoints that continue one, oldest first.

        Raises:
            NotFoundError: The session has no such checkpoint.
        """
        self.get(checkpoint_id)
        return _by_age(self._checkpoints[child] for child in self._graph.successors(checkpoint_id))

    def lineage(self, checkpoint_id: CheckpointId) -> Iterator[Checkpoint]:
        """Yield a checkpoint, its parent, and so on up to the root.

        Raises:
            NotFoundError: The session has no such checkpoint.
        """
        checkpoint: Checkpoint | None = self.get(checkpoint_id)
        while checkpoint is not None:
            yield checkpoint
            checkpoint = None if checkpoint.parent_id is None else self._checkpoints.get(checkpoint.parent_id)

    def chain(self, checkpoint_id: CheckpointId) -> list[Checkpoint]:
        """Return the checkpoints from the root to one.

        Raises:
            NotFoundError: The session has no such checkpoint.
        """
        return list(self.lineage(checkpoint_id))[::-1]

    def require_complete(self, checkpoint_id: CheckpointId | None) -> None:
        """Check that a checkpoint (None: none) and all before it are here, down to the root.

        Raises:
            CorruptionError: One is missing, and with it tokens.
        """
        missing = checkpoint_id if checkpoint_id not in self._checkpoints else None
        if checkpoint_id is not None and missing is None:
            *_, root = self.lineage(checkpoint_id)
            missing = root.parent_id
        if missing is not None:
            raise CorruptionError(f"checkpoint {missing.hex()} is lost, and with it tokens")

    def tokens(self, checkpoint_id: CheckpointId) -> bytes:
        """Return all tokens from the root to a checkpoint, as u32-le.

        Raises:
            NotFoundError: The session has no such checkpoint.
            CorruptionError: An ancestor is missing, so that tokens are missing.
        """
        chain = self.chain(checkpoint_id)
        tokens = b"".join(checkpoint.tokens for checkpoint in chain)
        if chain[0].parent_id is not None or sum(c.num_own_tokens for c in chain) != chain[-1].num_tokens:
            raise CorruptionError(
                f"checkpoint {short(checkpoint_id)} has {chain[-1].num_tokens} tokens, but its ancestors hold only "
                f"{sum(c.num_own_tokens for c in chain)}: run `agentmem check`"
            )
        return tokens

    def blocks(self, checkpoint_id: CheckpointId) -> list[BlockRef]:
        """Return the full blocks from the root to a checkpoint, in order, up to the first that nobody names.

        Raises:
            NotFoundError: The session has no such checkpoint.
        """
        #   parent  [0 ............ 6)         the parent's blocks 4 and 5 are no longer shared:
        #   child             [4 ......... 9)  the child's own begin at 4
        blocks: list[BlockRef] = []
        for checkpoint in self.chain(checkpoint_id):
            if checkpoint.first_block <= len(blocks):
                blocks[checkpoint.first_block :] = checkpoint.blocks
        return blocks

    def common_ancestor(self, one: CheckpointId, other: CheckpointId) -> Checkpoint | None:
        """Return the newest checkpoint that both continue (either itself included); None without one.

        Raises:
            NotFoundError: The session lacks one of the two.
        """
        seen = {checkpoint.checkpoint_id for checkpoint in self.lineage(one)}
        return next((checkpoint for checkpoint in self.lineage(other) if checkpoint.checkpoint_id in seen), None)

    def subtree_sizes(self) -> dict[CheckpointId, int]:
        """Count, for every checkpoint, itself and all that continue it."""
        sizes = dict.fromkeys(self._checkpoints, 1)
        for node in reversed(list(networkx.topological_sort(self._graph))):
            for parent in self._graph.predecessors(node):
                sizes[parent] += sizes[node]
        return sizes

    def resolve(self, text: str, branches: Mapping[str, CheckpointId | None]) -> Checkpoint:
        """Return the checkpoint that `text` names: a branch (its tip), an id, or a unique prefix of an id.

        Args:
            text: What the user typed.
            branches: The tips of the session's branches.

        Raises:
            NotFoundError: Nothing is called so, or the branch has no checkpoint yet; lists what is near.
            InvalidInputError: The prefix is too short, or several checkpoints share it; lists them.
        """
        if text in branches:
            return self._tip(text, branches[text])
        if not text or any(digit not in "0123456789abcdef" for digit in text.strip().lower()):
            raise self._nothing_called(text, branches)
        prefix = parse_prefix(text)
        found = [checkpoint for checkpoint in self if checkpoint.checkpoint_id.hex().startswith(prefix)]
        if not found:
            raise self._nothing_called(text, branches)
        if len(found) > 1:
            raise InvalidInputError(f"{text!r} is ambiguous: {_listed(c.checkpoint_id.hex() for c in _by_age(found))}")
        return found[0]

    def _connect(self, checkpoint: Checkpoint) -> None:
        if checkpoint.parent_id in self._checkpoints and checkpoint.parent_id is not None:
            self._graph.add_edge(checkpoint.parent_id, checkpoint.checkpoint_id)

    def _tip(self, name: str, tip: CheckpointId | None) -> Checkpoint:
        if tip is None:
            raise NotFoundError(f"branch {name!r} has no checkpoint yet: make one with `checkpoint`")
        return self.get(tip)

    def _nothing_called(self, text: str, branches: Mapping[str, CheckpointId | None]) -> NotFoundError:
        near = difflib.get_close_matches(text, branches, n=_MAX_LISTED, cutoff=0.5)
        wanted = text.strip().lower()[:4]
        near += [c.checkpoint_id.hex()[:8] for c in self if wanted and c.checkpoint_id.hex().startswith(wanted)]
        near = near or [*branches]
        hint = f"did you mean {_listed(near)}?" if near else "the session is empty"
        return NotFoundError(f"no branch or checkpoint is called {text!r}; {hint}")


def _by_age(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.created_s, checkpoint.checkpoint_id))


def _listed(names: Iterable[str]) -> str:
    """Join the first few names; say how many more there are."""
    all_names = list(names)
    more = len(all_names) - _MAX_LISTED
    return ", ".join(all_names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
