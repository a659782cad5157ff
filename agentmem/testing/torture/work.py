"""A client that works on a session of its own, at random, and notes what the store has acknowledged.

It never checks anything: it is killed, starved of disk and cut off from power; `examine.py` looks at what is left.
"""

import random

from agentmem.session import Session
from agentmem.store import Store
from agentmem.testing.torture.promises import PromiseBook

MAX_TOKENS = 160
_MAX_BRANCHES = 6


class Client:
    """One client of a store."""

    def __init__(self, store: Store, name: str, book: PromiseBook, seed: int) -> None:
        """Create or resume the session `name`; `seed` decides what is done."""
        self._book = book
        self._rng = random.Random(seed)
        self._prefix = f"b{seed}"
        self._num_made = 0
        if any(record.name == name for record in store.sessions()):
            self.session: Session = store.resume(name)
        else:
            self.session = store.create(name)
            book.promise(name, "main", None, ())

    def act(self) -> None:
        """Do one thing, and then most often make a checkpoint."""
        if self.session.active.num_tokens > MAX_TOKENS:
            self._start_anew()
        steps = [self._append, self._append, self._generate, self._fork, self._switch, self._try_and_drop, self._retire]
        self._rng.choice(steps)()
        if self.session.active.num_tokens and self._rng.random() < 0.8:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make a checkpoint of the active branch, and note it once it is durable."""
        branch = self.session.active
        checkpoint = branch.checkpoint(f"{self._num_made}")
        self._book.promise(self.session.name, branch.name, checkpoint, branch.tokens)

    def _append(self) -> None:
        self.session.append([self._rng.randrange(1, 500) for _ in range(self._rng.randrange(1, 40))])

    def _generate(self) -> None:
        if self.session.active.num_tokens:
            self.session.generate(max_new_tokens=self._rng.randrange(1, 4), do_sample=False)

    def _fork(self) -> None:
        if len(self.session.branches) < _MAX_BRANCHES:
            self.session.switch(self.session.fork(self._name()).name)

    def _switch(self) -> None:
        self.session.switch(self._rng.choice(self.session.branches))

    def _try_and_drop(self) -> None:
        """Leave something behind that gc may take."""
        active, name = self.session.active.name, self._name()
        self.session.switch(self.session.fork(name).name)
        self._append()
        self.session.checkpoint()
        self.session.rewind(tokens=self._rng.randrange(1, 20) % self.session.active.num_tokens)
        self.session.switch(active)
        self.session.drop(name)

    def _retire(self) -> None:
        others = [name for name in self.session.branches if name != self.session.active.name]
        if len(others) >= _MAX_BRANCHES - 1:
            name = self._rng.choice(others)
            self._book.withdraw(self.session.name, name)
            self.session.drop(name)

    def _start_anew(self) -> None:
        """Go on from an early checkpoint that the active branch passes through."""
        tip = self.session.active.tip
        lineage = () if tip is None else self.session.ledger.tree.lineage(tip.checkpoint_id)
        early = [checkpoint for checkpoint in lineage if checkpoint.num_tokens < MAX_TOKENS // 2]
        name = self._name()
        if early:
            self.session.fork(name, at=early[0])
        else:
            self.session.fork(name)
            self.session.rewind(tokens=self.session.branch(name).num_tokens - MAX_TOKENS // 2, branch=name)
        self.session.switch(name)

    def _name(self) -> str:
        self._num_made += 1
        return f"{self._prefix}-{self._num_made}"
