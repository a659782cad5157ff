"""What the zygotes of the torture tests share: one tiny model, and things that a worker does to a store."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from agentmem.store import Store
from agentmem.testing.models import tiny_model
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.work import Client
from agentmem.testing.zygote import serve

SESSIONS = ("one", "two")
"""The sessions of the store that `make_store` makes."""


def serve_tasks(tasks: Mapping[str, Callable[..., object]]) -> None:
    """Be a zygote whose workers do the task that they are told the name of; each gets a tiny Llama in fp32 first."""
    torch.set_num_threads(1)  # no threads in the zygote: a forked child would wait for them for ever
    model = tiny_model("llama")

    def work(name: str, *arguments: object) -> object:
        torch.set_num_threads(1)  # makes the pool of the forked child, before two threads of it do so at once
        return tasks[name](model, *arguments)

    serve(work)


def make_store(open_store: Callable[[], Store], folder: Path, num_acts: int) -> None:
    """Make two sessions in a new store, and write what it promises to `folder`/book."""
    book = PromiseBook(folder / "book")
    with open_store() as store:
        clients = [Client(store, name, book, 5) for name in SESSIONS]
        for _, client in zip(range(num_acts), itertools.cycle(clients), strict=False):
            client.act()
