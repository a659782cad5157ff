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
