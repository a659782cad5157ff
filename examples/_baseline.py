"""The same search without agentmem: every branch has a DynamicCache of its own, made by `copy.deepcopy`.

`CopySession` has the verbs of `agentmem.Session` that a search uses, so that the same search runs on both.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

CHUNK = 2048
"""Most tokens fed in one pass, as agentmem does by default: so both compute the same bits."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The new tokens, and their text."""

    tokens: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """Where a branch stood."""

    checkpoint_id: bytes
    num_tokens: int


class CopyBranch:
    """Tokens, and a cache of its own: copied when the branch first needs it, which is a favour to this baseline."""

    def __init__(self, session: "CopySession", name: str, source: "CopyBranch | None" = None) -> None:
        """Stand where `source` stands; without one, be empty."""
        self.name = name
        self.tokens = list(source.tokens) if source else []
        self.cache = source.cache if source else DynamicCache(config=session.model.config)
        self.extras = copy.deepcopy(source.extras) if source else {}
        self.tip = source.tip if source else None
        self.num_fed = 0
        self._is_shared = source is not None
        self._session = session

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def append(self, content: str | Iterable[int]) -> None:
        """Add text or ids at the end."""
        if isinstance(content, str):
            content = self._session.tokenizer(content, add_special_tokens=not self.tokens)["input_ids"]
        self.tokens += content

    def generate(self, *, seed: int, **options: Any) -> Sample:
        """Continue with transformers' generation."""
        cache = self._own()
        ids = torch.tensor([self.tokens])
        _keep(cache, len(self.tokens) - 1)
        before = cache.get_seq_length()
        torch.manual_seed(seed)
        output = self._session.model.generate(
            ids, cache=cache, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
        )
        new = output[0, len(self.tokens) :].tolist()
        self.tokens += new
        self._note_fed(cache.get_seq_length() - before)
        return Sample(new, self._session.tokenizer.decode(new))

    def rewind(self, *, tokens: int) -> None:
        """Take the last tokens off."""
        del self.tokens[len(self.tokens) - tokens :]
        if self.cache.get_seq_length() > len(self.tokens):
            _keep(self._own(), len(self.tokens))

    def checkpoint(self, _message: str) -> Point:
        """Feed what is pending but for the last token, as agentmem does. Nothing is saved."""
        todo = self.tokens[self.cache.get_seq_length() : -1]
        for chunk in _chunks(todo):
            with torch.no_grad():
                self._session.model(torch.tensor([chunk]), cache=self._own(), logits_to_keep=1)
            self._note_fed(len(chunk))
        self.tip = Point(self.name.encode(), self.num_tokens)
        return self.tip

    def _note_fed(self, num_tokens: int) -> None:
        self.num_fed += num_tokens
        self._session.num_fed += num_tokens

    def _own(self) -> DynamicCache:
        if self._is_shared:
            self.cache, self._is_shared = copy.deepcopy(self.cache), False
        return self.cache


class CopyBatch:
    """Branches that are continued one after the other: with a cache each, there is nothing that they could share."""

    def __init__(self, branches: Sequence[CopyBranch]) -> None:
        """Continue `branches`."""
        self._branches = branches

    def __enter__(self) -> "CopyBatch":
        return self

    def __exit__(self, *_error: object) -> None:
        """Do nothing: each branch has its tokens already."""

    def generate(self, *, per_branch: Mapping[str, Mapping[str, Any]], **options: Any) -> dict[str, Sample]:
        """Continue every branch with options of its own and common ones."""
        return {branch.name: branch.generate(**options, **per_branch[branch.name]) for branch in self._branches}


class CopySession:
    """Branches that share nothing."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start with one empty branch, "main"."""
        self.model = model
        self.tokenizer = tokenizer
        self.num_fed = 0
        self.active = CopyBranch(self, "main")
        self._branches = {"main": self.active}

    @property
    def branches(self) -> list[str]:
        """The names of the branches, oldest first."""
        return list(self._branches)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that all branches hold."""
        caches = {id(branch.cache): branch.cache for branch in self._branches.values()}
        layers = [layer for cache in caches.values() for layer in cache.layers if layer.keys is not None]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    @property
    def adapter(self) -> Any:
        """What a search asks for the size of a token: nobody keeps a budget of bytes here."""
        return SimpleNamespace(spec=SimpleNamespace(token_nbytes=1, state_nbytes=0))

    def branch(self, name: str) -> CopyBranch:
        """Return a branch by name."""
        return self._branches[name]

    def fork(self, name: str, *, at: str | None = None, branch: str | None = None) -> CopyBranch:
        """Copy a branch, found by its name or by its checkpoint's id in hex: nobody moves on after a checkpoint."""
        source = branch if at is None else bytes.fromhex(at).decode()
        self._branches[name] = CopyBranch(self, name, self._branches[str(source)])
        return self._branches[name]

    def batch(self, names: Sequence[str]) -> CopyBatch:
        """Continue several branches."""
        return CopyBatch([self._branches[name] for name in names])

    def switch(self, name: str) -> None:
        """Go on with another branch."""
        self.active = self._branches[name]

    def drop(self, name: str) -> None:
        """Forget a branch."""
        del self._branches[name]

    def flush(self) -> None:
        """Do nothing: there is no disk."""


def _keep(cache: DynamicCache, num_tokens: int) -> None:
    """Cut a cache to its first `num_tokens` tokens, if it has more."""
    if cache.get_seq_length() > num_tokens:
        cache.crop(num_tokens - cache.get_seq_length())


def _chunks(tokens: list[int]) -> Iterable[list[int]]:
    return (tokens[first : first + CHUNK] for first in range(0, len(tokens), CHUNK))
