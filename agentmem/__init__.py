"""agentmem: the memory of an AI agent that thinks in branches.

A session is a tree of KV-cache checkpoints. `fork` costs microseconds; `switch` and `resume` continue a context without
computing it again. Importing this module imports neither torch nor a framework: names are loaded when they are used.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, overload

from agentmem._crypto import key_from_passphrase
from agentmem._version import __version__
from agentmem.config import Config, Residency
from agentmem.errors import (
    AgentMemError,
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    CorruptionError,
    EncryptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    SessionLeasedError,
    SpecMismatchError,
    StaleCacheError,
    StorageFullError,
    StoreLockedError,
    TierUnavailableError,
    UnsupportedModelError,
)
from agentmem.reasons import Reason
from agentmem.stats import ChatDifference, Finding, ReuseReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentmem.batch.batch import Batch
    from agentmem.batch.report import BatchReport, Score
    from agentmem.branch import Branch, Generation
    from agentmem.chat.conversation import Reply
    from agentmem.explain.explanation import Explanation
    from agentmem.gc import GcReport
    from agentmem.pruning import PrunedItem, PruneReport
    from agentmem.residency import SweepReport
    from agentmem.retention import Retention
    from agentmem.session import Session
    from agentmem.store import Store
    from agentmem.tiers.pyramid import micron_pyramid
    from agentmem.tiers.remote import RecordTier
    from agentmem.tree.checkpoint import Checkpoint
    from agentmem.view import StoreView

_LAZY = {
    "Batch": "agentmem.batch.batch",
    "BatchReport": "agentmem.batch.report",
    "Branch": "agentmem.branch",
    "Checkpoint": "agentmem.tree.checkpoint",
    "Explanation": "agentmem.explain.explanation",
    "GcReport": "agentmem.gc",
    "Generation": "agentmem.branch",
    "PruneReport": "agentmem.pruning",
    "PrunedItem": "agentmem.pruning",
    "SweepReport": "agentmem.residency",
    "micron_pyramid": "agentmem.tiers.pyramid",
    "Reply": "agentmem.chat.conversation",
    "Retention": "agentmem.retention",
    "Score": "agentmem.batch.report",
    "Session": "agentmem.session",
    "Store": "agentmem.store",
    "StoreView": "agentmem.view",
}

__all__ = [
    "AgentMemError",
    "AlreadyExistsError",
    "Batch",
    "BatchReport",
    "Branch",
    "CapacityError",
    "ChatDifference",
    "Checkpoint",
    "ClosedError",
    "Config",
    "CorruptionError",
    "EncryptionError",
    "Explanation",
    "Finding",
    "FormatVersionError",
    "GcReport",
    "Generation",
    "InvalidInputError",
    "NotFoundError",
    "PruneReport",
    "PrunedItem",
    "ReadOnlyError",
    "Reason",
    "Reply",
    "Residency",
    "Retention",
    "ReuseReport",
    "Score",
    "Session",
    "SessionLeasedError",
    "SpecMismatchError",
    "StaleCacheError",
    "StorageFullError",
    "Store",
    "StoreLockedError",
    "StoreView",
    "SweepReport",
    "TierUnavailableError",
    "UnsupportedModelError",
    "__version__",
    "key_from_passphrase",
    "micron_pyramid",
    "open",
]


@overload
def open(path: "str | Path", *, config: Config | None = None) -> "StoreView": ...


@overload
def open(
    path: "str | Path",
    *,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    config: Config | None = None,
    tiers: "Sequence[RecordTier]" = (),
) -> "Store": ...


def open(
    path: "str | Path",
    *,
    model: "PreTrainedModel | None" = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    config: Config | None = None,
    tiers: "Sequence[RecordTier]" = (),
) -> "Store | StoreView":
    """Open the store at `path`.

    With a model the store is made when there is none, and sessions can be created and resumed. Without a model it can
    be listed and inspected, and nothing of torch is imported. Any number of processes may have it open, each once; a
    session is written to by one of them at a time.

    Args:
        path: The store's directory.
        model: Any causal language model of transformers, in eval mode, on one device.
        tokenizer: Its tokenizer; needed to append text and to show it.
        config: Choices such as budgets; see `Config`.
        tiers: Tiers of one's own below the disk, the nearest first (docs/tiers.md). They are closed with the store.

    Returns:
        A `Store` with a model, a `StoreView` without. Either is a context manager.

    Raises:
        UnsupportedModelError: The model keeps state that agentmem does not store.
        NotFoundError: There is no store, and no model was given to make one for.
        InvalidInputError: The path is something else than a store.
        StoreLockedError: This process has the store open already, or another one is replacing its data file.
        FormatVersionError: The store needs a newer agentmem.
        EncryptionError: The store is encrypted and the key is missing or another one, or it is not encrypted.
        CorruptionError: The store's files are cut off or damaged.
        ReadOnlyError: The directory cannot be written to.
    """
    config = config if config is not None else Config()
    if model is None:
        if tiers:
            raise InvalidInputError("tiers= are for loading KV onto a model's device: give a model, or leave them out")
        from agentmem._lmdb import Environment
        from agentmem.view import StoreView

        return StoreView(Environment.open(Path(path), read_only=True, key=config.encryption_key), config)
    from agentmem.adapters.transformers import TransformersAdapter
    from agentmem.store import Store

    return Store.open(Path(path), lambda: TransformersAdapter(model, tokenizer, config), config, tiers)


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'agentmem' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
