"""How the children of a node come to be: forks of its branch, continued by the model or by a function of the user's.

Everything random comes from a seed that depends on the search's seed and on a child's place in the tree, and on
nothing else: a child that has to be made again is made the same.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from agentmem.errors import CapacityError, InvalidInputError
from agentmem.search.node import Expansion, Node
from agentmem.search.protocols import B, SearchSession
from agentmem.search.tree import SearchTree

Content = str | Iterable[int]
"""Text or token ids."""


class Sampling:
    """Let the model continue every child: the children of a step are sampled together."""

    __slots__ = ("max_new_tokens", "options")

    def __init__(self, *, max_new_tokens: int, **options: object) -> None:
        """Sample with transformers' own options of `generate`.

        Args:
            max_new_tokens: Tokens of a child at most.
            **options: temperature, top_k, top_p, eos_token_id, stop_strings ... `do_sample` is True unless given.

        Raises:
            InvalidInputError: `max_new_tokens` is below 1, or a seed was given: the search has its own.
        """
        if max_new_tokens < 1 or "seed" in options:
            raise InvalidInputError(
                f"Sampling takes max_new_tokens of at least 1, and no seed (every child gets one, from the search's); "
                f"found max_new_tokens={max_new_tokens}, {', '.join(options) or 'nothing else'}"
            )
        self.max_new_tokens = max_new_tokens
        self.options: dict[str, object] = {"do_sample": True, **options, "max_new_tokens": max_new_tokens}

    def __repr__(self) -> str:
        return f"Sampling({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


Grow = Callable[[B, int], Iterable[Content] | None]
"""Continues a child's branch, given a seed. Returns nothing, and is called for each child of a node; or leaves the
branch as it is and returns what its children are to begin with, and is called once for a node."""


class Together(Generic[B]):
    """Let a function of the user's continue all children of a step at once, as with `session.batch`."""

    __slots__ = ("grow",)

    def __init__(self, grow: Callable[[Sequence[B], Sequence[int]], object]) -> None:
        """Call `grow` once a step, with the children's branches and a seed for each."""
        self.grow = grow


Expand = Sampling | Together[B] | Grow[B]
"""How a child continues its branch."""


@dataclass(frozen=True, slots=True)
class Child:
    """A node that is being made.

    Attributes:
        name: Its branch.
        number: Its number.
        parent: The node it continues.
        index: Which child of it.
        seed: Of what is random in it.
    """

    name: str
    number: int
    parent: Node
    index: int
    seed: int


def child_seed(seed: int, path: Sequence[int]) -> int:
    """Return the seed of the node that the indexes in `path` lead to: 63 bits."""
    text = f"{seed}/{'.'.join(map(str, path))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Nursery(Generic[B]):
    """Makes the children of one step. Their numbers go on from those of the tree."""

    def __init__(self, session: SearchSession[B], name: str, tree: SearchTree, seed: int) -> None:
        """Make children in `session`, for the search `name`."""
        self._session = session
        self._name = name
        self._tree = tree
        self._seed = seed
        self._next = len(tree.nodes)

    def grow(self, expansions: Sequence[Expansion], expand: Expand[B]) -> Iterator[Child]:
        """Yield the children of some nodes, grown: together, or one after the other by a function of one branch.

        Raises:
            InvalidInputError: A function returned continuations and changed its branch too.
        """
        if isinstance(expand, Sampling | Together):
            children = self._fork_all(expansions)
            names, seeds = [child.name for child in children], [child.seed for child in children]
            if isinstance(expand, Sampling):
                generate_children(self._session, names, expand, seeds)
            else:
                expand.grow([self._session.branch(name) for name in names], seeds)
            yield from children
            return
        for expansion in expansions:
            yield from self._call(self._tree.nodes[expansion.node], expansion.num_children, expand)

    def _fork_all(self, expansions: Sequence[Expansion]) -> list[Child]:
        return [
            self._fork(self._tree.nodes[expansion.node], index)
            for expansion in expansions
            for index in self._indexes(expansion.node, expansion.num_children)
        ]

    def _call(self, parent: Node, num_children: int, grow: Grow[B]) -> Iterator[Child]:
        for index in self._indexes(parent.number, num_children):
            child = self._fork(parent, index)
            branch = self._session.branch(child.name)
            contents = grow(branch, child.seed)
            if contents is not None:
                yield from self._append(child, branch, list(contents))
                return
            yield child

    def _append(self, first: Child, branch: B, contents: list[Content]) -> Iterator[Child]:
        """Yield a child for each of the continuations; the first of them is there already."""
        if branch.num_tokens != first.parent.num_tokens:
            raise InvalidInputError(
                f"expand returned {len(contents)} continuations of branch {first.name!r} and changed it too: "
                f"it had {first.parent.num_tokens:,} tokens and has {branch.num_tokens:,}; do one or the other"
            )
        for position, content in enumerate(contents):
            child = first if not position else self._fork(first.parent, first.index + position)
            self._session.branch(child.name).append(content)
            yield child
        if not contents:
            yield first  # it adds nothing, and is given up

    def _indexes(self, parent: int, num_children: int) -> range:
        first = len(self._tree.children(parent))
        return range(first, first + num_children)

    def _fork(self, parent: Node, index: int) -> Child:
        number = self._next
        self._next += 1
        seed = child_seed(self._seed, (*self._tree.path(parent.number), index))
        child = Child(f"{self._name}/{number}", number, parent, index, seed)
        self._session.fork(child.name, at=parent.checkpoint_id.hex())
        return child


def generate_children(
    session: SearchSession[B], names: Sequence[str], sampling: Sampling, seeds: Sequence[int]
) -> None:
    """Continue several branches with the model, together, each from its own seed.

    Raises:
        CapacityError: The device budget is too small for one of them alone.
    """
    if not _sample_batch(session, names, sampling, seeds):
        middle = len(names) // 2
        generate_children(session, names[:middle], sampling, seeds[:middle])
        generate_children(session, names[middle:], sampling, seeds[middle:])


def _sample_batch(session: SearchSession[B], names: Sequence[str], sampling: Sampling, seeds: Sequence[int]) -> bool:
    """Continue branches as one batch; return False, with all of them as they were, when several do not fit."""
    options = {name: {**sampling.options, "seed": seed} for name, seed in zip(names, seeds, strict=True)}
    try:
        with session.batch(names) as batch:
            batch.generate(per_branch=options, max_new_tokens=sampling.max_new_tokens)
    except CapacityError:
        if len(names) == 1:
            raise
        return False  # tried again outside, where the error no longer holds on to the batch's memory
    return True
