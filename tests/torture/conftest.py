"""Fixtures of the torture tests: the library of faults, built once."""

import shutil

import pytest

from agentmem.testing.torture import shim


@pytest.fixture(scope="session")
def faults():
    """Return the path of the library of faults."""
    library = shim.build()
    yield library
    shutil.rmtree(library.parent)


@pytest.fixture(scope="module")
def template(worker, tmp_path_factory):
    """A store with two sessions, and what it has promised: made by the `worker` of the file that asks for it."""
    folder = tmp_path_factory.mktemp("template")
    worker.run("prepare", str(folder)).result()
    return folder
