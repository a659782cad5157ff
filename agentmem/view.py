"""A store without a model: list it, look at its trees, count its bytes. Starts fast: nothing here imports torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from agentmem._lmdb import Environment, ReadTransaction
from agentmem.config import Config
from agentmem.errors import CorruptionError
from agentmem.ids import SessionId
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move, SessionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """What is stored of a session.

    Attributes:
        record: The session.
        branches: Its branches, oldest first.
        checkpoints: Its checkpoints, oldest first, with those that gc has not removed yet.
        damaged: What could not be read, in words.
    """

    record: SessionRecord
    branches: list[BranchRecord]
    checkpoints: list[Checkpoint]
    damaged: list[str]


class StoreView:
    """An open store directory, for everything that needs no model."""

    def __init__(self, environment: Environment, config: Config) -> None:
        """Own an open environment; use `agentmem.open`."""
        self.environment = environment
        self.config = config
        self.catalog = Catalog()

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self.environment.path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def sessions(self) -> list[SessionRecord]:
        """Return every session, oldest first."""
        with self.environment.read() as txn:
            return self.catalog.sessions(txn, [])

    def view(self, name: str) -> SessionView:
        """Return what is stored of a session.

        Raises:
            NotFoundError: There is none of that name.
        """
        with self.environment.read() as txn:
            return self._view(txn, self.catalog.find_session(txn, name))

    def moves(self, name: str) -> list[Move]:
        """Return a session's reflog, oldest first."""
        with self.environment.read() as txn:
            return self.catalog.moves(txn, self.catalog.find_session(txn, name).session_id, [])

    def log(self, name: str, *, notes: Mapping[str, str] | None = None, fold: bool = True) -> str:
        """Return a session's tree as text."""
        view = self.view(name)
        tree = importlib.import_module("agentmem.tree.tree")  # networkx takes a third of a second
        rendering = importlib.import_module("agentmem.tree.render")
        return str(
            rendering.render(
                tree.SessionTree(view.checkpoints),
                title=name,
                branches=view.branches,
                active=view.record.active_branch,
                notes=notes,
                fold=fold,
            )
        )

    def open_tokens(self, session_id: SessionId, branch: str) -> list[int]:
        """Return the tokens after a branch's tip."""
        with self.environment.read() as txn:
            return list(self.catalog.open_tokens(txn, session_id, branch))

    def close(self) -> None:
        """Let go of the directory."""
        self.environment.close()

    def _view(self, txn: ReadTransaction, record: SessionRecord) -> SessionView:
        damaged: list[CorruptionError] = []
        return SessionView(
            record=record,
            branches=self.catalog.branches(txn, record.session_id, damaged),
            checkpoints=self.catalog.checkpoints(txn, record.session_id, damaged),
            damaged=[str(error) for error in damaged],
        )
