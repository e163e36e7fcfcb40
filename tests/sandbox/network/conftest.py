"""Fixtures of the networks' tests: a laboratory of their own for each file, and its engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from sandbox_kernel.engine.client import Engine
from tests.engines import MissingEngineError
from tests.sandbox.network.lab import NetworkLab


@pytest.fixture(scope="module")
def lab() -> Iterator[NetworkLab]:
    """An engine in a network namespace of its own, with a simulated outside."""
    try:
        made = NetworkLab()
    except MissingEngineError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture
async def lab_engine(lab: NetworkLab) -> AsyncIterator[Engine]:
    """The laboratory's engine, opened in the test's own loop."""
    async with Engine(lab.endpoint) as opened:
        yield opened
