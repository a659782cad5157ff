"""The same search without agentmem: every branch has a DynamicCache of its own, made by `copy.deepcopy`.

`CopySession` has the verbs of `agentmem.Session` that tree_search.py uses, so that the same search runs on both.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
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


class CopyBranch:
    """Tokens, and a cache of its own."""

    def __init__(self, name: str, tokens: list[int], cache: DynamicCache, extras: dict[str, Any]) -> None:
        """Own `cache`."""
        self.name = name
        self.tokens = tokens
        self.cache = cache
        self.extras = extras

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the branch holds."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.keys is not None)


class CopySession:
    """Branches that share nothing."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start with one empty branch, "main"."""
        self.model = model
        self.tokenizer = tokenizer
        self.active = CopyBranch("main", [], DynamicCache(config=model.config), {})
        self._branches = {"main": self.active}

    @property
    def branches(self) -> list[str]:
        """The names of the branches, oldest first."""
        return list(self._branches)

    @property
    def nbytes(self) -> int:
        """Bytes of KV that all branches hold."""
        return sum(branch.nbytes for branch in self._branches.values())

    def branch(self, name: str) -> CopyBranch:
        """Return a branch by name."""
        return self._branches[name]

    def fork(self, name: str, *, at: str) -> None:
        """Copy a branch with all its KV."""
        source = self._branches[at]
        extras = copy.deepcopy(source.extras)
        self._branches[name] = CopyBranch(name, list(source.tokens), copy.deepcopy(source.cache), extras)

    def switch(self, name: str) -> None:
        """Go on with another branch."""
        self.active = self._branches[name]

    def drop(self, name: str) -> None:
        """Forget a branch."""
        del self._branches[name]

    def append(self, content: str) -> None:
        """Add text at the end."""
        is_first = not self.active.tokens
        self.active.tokens += self.tokenizer(content, add_special_tokens=is_first)["input_ids"]

    def generate(self, *, seed: int, **options: Any) -> Sample:
        """Continue the active branch with transformers' generation."""
        ids = torch.tensor([self.active.tokens])
        _keep(self.active.cache, len(self.active.tokens) - 1)
        torch.manual_seed(seed)
        output = self.model.generate(
            ids, cache=self.active.cache, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
        )
        new = output[0, len(self.active.tokens) :].tolist()
        self.active.tokens += new
        return Sample(new, self.tokenizer.decode(new))

    def rewind(self, *, tokens: int) -> None:
        """Take the last tokens off."""
        del self.active.tokens[len(self.active.tokens) - tokens :]
        _keep(self.active.cache, len(self.active.tokens))

    def checkpoint(self, _message: str) -> None:
        """Feed what is pending but for the last token, as agentmem does. Nothing is saved."""
        todo = self.active.tokens[self.active.cache.get_seq_length() : -1]
        for chunk in _chunks(todo):
            with torch.no_grad():
                self.model(torch.tensor([chunk]), cache=self.active.cache, logits_to_keep=1)

    def flush(self) -> None:
        """Do nothing: there is no disk."""


def _keep(cache: DynamicCache, num_tokens: int) -> None:
    """Cut a cache to its first `num_tokens` tokens, if it has more."""
    if cache.get_seq_length() > num_tokens:
        cache.crop(num_tokens - cache.get_seq_length())


def _chunks(tokens: list[int]) -> Iterable[list[int]]:
    return (tokens[first : first + CHUNK] for first in range(0, len(tokens), CHUNK))
