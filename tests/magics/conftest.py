"""Notebooks to run cells in: a kernel for each module, whose sandboxes have a prefix of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.engines import Engines
from tests.magics.notebook import Notebook, no_sandbox_left, open_notebook

Open = Callable[..., AbstractContextManager[Notebook]]


@pytest.fixture(scope="module")
def prefix(engines: Engines) -> Iterator[str]:
    """What the names of the module's sandboxes begin with; none of them may be left."""
    name = f"sbx-magics-{uuid.uuid4().hex[:8]}-"
    yield name
    no_sandbox_left(engines, name)


@pytest.fixture(scope="module")
def kernel_env(engines: Engines, prefix: str) -> dict[str, str]:
    """The environment of the module's kernels, which have an owner of their own."""
    return {
        "SANDBOX_DOCKER_HOST": engines.unix,
        "SANDBOX_DOCKER_PREFIX": prefix,
        "JUPYTERHUB_USER": f"tester-{prefix}",
    }


@pytest.fixture(scope="module")
def notebook(
    kernel_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    """A notebook that the module's tests share, the notebook's sandbox included."""
    with open_notebook(tmp_path_factory.mktemp("notebook"), kernel_env) as opened:
        yield opened


@pytest.fixture
def open_one(kernel_env: dict[str, str], tmp_path: Path) -> Open:
    """Open a notebook of one's own."""

    def opened(load: bool = True, **env: str) -> AbstractContextManager[Notebook]:
        return open_notebook(tmp_path, {**kernel_env, **env}, load=load)

    return opened
