"""What a search asks of a session and its branches: the verbs of `agentmem.Session`, or of anything that has them.

Names no framework and no tensor, so that a policy can be tried without either.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, TypeVar


class Point(Protocol):
    """A checkpoint."""

    @property
    def checkpoint_id(self) -> bytes:
        """Its name."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens from the session's root to here."""
        ...


class SearchBranch(Protocol):
    """A branch that stands for a node of a search."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of its tokens."""
        ...

    @property
    def num_fed(self) -> int:
        """Tokens that the model was fed through it, in this process."""
        ...

    @property
    def tip(self) -> Point | None:
        """The checkpoint that it points at; None before the first."""
        ...

    @property
    def extras(self) -> dict[str, object]:
        """Its metadata, written with its next change."""
        ...

    def append(self, content: str | Iterable[int]) -> None:
        """Add text or token ids at the end."""
        ...

    def generate(self, **options: object) -> object:
        """Continue with the model's generation."""
        ...

    def rewind(self, *, tokens: int) -> None:
        """Take the last tokens off."""
        ...

    def checkpoint(self, message: str = "", *, extras: Mapping[str, object] | None = None) -> Point:
        """Make a durable point of it."""
        ...


class SearchBatch(Protocol):
    """Branches that are continued together, inside a `with` block."""

    def __enter__(self) -> "SearchBatch":
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the branches go, with what they were given."""
        ...

    def generate(self, *, per_branch: Mapping[str, Mapping[str, object]], max_new_tokens: int) -> object:
        """Continue every branch with options of its own."""
        ...


class Geometry(Protocol):
    """How large a model's KV is."""

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV that one token takes."""
        ...

    @property
    def state_nbytes(self) -> int:
        """Bytes of the layer states at one position."""
        ...


class Model(Protocol):
    """The model behind a session."""

    @property
    def spec(self) -> Geometry:
        """The geometry of its KV."""
        ...


B_co = TypeVar("B_co", bound=SearchBranch, covariant=True)
B = TypeVar("B", bound=SearchBranch)


class SearchSession(Protocol[B_co]):
    """A session that is searched in."""

    @property
    def adapter(self) -> Model:
        """The model."""
        ...

    @property
    def active(self) -> B_co:
        """The active branch, where a search begins unless another one is named."""
        ...

    @property
    def branches(self) -> list[str]:
        """The names of its branches."""
        ...

    def branch(self, name: str) -> B_co:
        """Return a branch by name."""
        ...

    def fork(self, name: str, *, at: str | None = None, branch: str | None = None) -> B_co:
        """Make a branch at the checkpoint with the id `at`, in hex, or where a branch stands now."""
        ...

    def batch(self, branches: Sequence[str]) -> SearchBatch:
        """Continue several branches together."""
        ...

    def switch(self, name: str) -> object:
        """Make a branch the active one."""
        ...

    def drop(self, name: str) -> None:
        """Remove a branch."""
        ...


Score = Callable[[B], float]
"""Says what a branch is worth: more is better, -inf gives it up at once. What it appends is taken off again."""

IsDone = Callable[[B], bool]
"""Says whether a branch is an answer, which nothing is to be added to."""
