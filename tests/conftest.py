"""Fixtures that every layer's tests share: the real engine, both ways to it, and an image."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from tests.engines import (
    RUN_LABEL,
    VERSION_LABEL,
    Engines,
    MissingEngineError,
    find_engines,
    leftovers,
    provide_busybox,
    remove_leftovers,
)

# Where the way to the engine is part of what is tested. All else makes the same calls: over TLS it
# is tested with what is slow.
BOTH_WAYS = (
    "tests/engine/",
    "tests/kernel/test_provisioner.py",
    "tests/process/test_lost.py",
    "tests/process/test_run.py",
    "tests/process/test_starting.py",
    "tests/process/test_stop.py",
    "tests/sandbox/test_facade.py",
)

# Long enough for a sandbox whose owner has just gone to be removed by its lease.
LEFTOVER_BOUND = 20.0


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        # Workers of xdist inherit it from the process that starts them.
        os.environ["SANDBOX_TEST_RUN"] = uuid.uuid4().hex[:12]


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Take the second way to the engine for slow where it makes no difference."""
    way = getattr(item, "callspec", None)
    if way is None or way.params.get("endpoint") != "mtls":
        return
    if not item.nodeid.startswith(BOTH_WAYS):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow unless it is asked for, with ``-m slow`` or by its own name."""
    asked = config.option.markexpr or any("::" in argument for argument in config.args)
    slow = [] if asked else [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session")
def engines() -> Engines:
    """The test engine; without one every test that asks for it is an error."""
    try:
        return find_engines()
    except MissingEngineError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def engine_unix(engines: Engines) -> Endpoint:
    """The engine on its Unix socket."""
    return engines.unix_endpoint


@pytest.fixture(scope="session")
def engine_tls(engines: Engines) -> Endpoint:
    """The same engine over mutual TLS on loopback."""
    return engines.tls_endpoint


@pytest.fixture(params=["unix", "mtls"])
def endpoint(request: pytest.FixtureRequest, engines: Engines) -> Endpoint:
    """Each way to the engine in turn: the results must be the same."""
    return engines.unix_endpoint if request.param == "unix" else engines.tls_endpoint


@pytest.fixture
async def engine(endpoint: Endpoint) -> AsyncIterator[Engine]:
    """An open engine in the test's own loop, by each way in turn."""
    async with Engine(endpoint) as opened:
        yield opened


@pytest.fixture(scope="session")
def busybox_image(engines: Engines) -> str:
    """A 2 MB image: static busybox, users 10001 and 10002, /workspace owned by 10001."""
    try:
        return provide_busybox(engines)
    except MissingEngineError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def run_labels() -> dict[str, str]:
    """Labels for whatever a test creates itself; what still has them at the end is a leak."""
    return {VERSION_LABEL: "test", RUN_LABEL: os.environ["SANDBOX_TEST_RUN"]}


@pytest.fixture
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own for configuration and policy, for this process and its children."""
    folder = tmp_path / "jupyter-config"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(folder))
    for name in [*os.environ]:
        if name.startswith("SANDBOX_DOCKER_") or name in {
            "JUPYTER_CONFIG_PATH",
            "JUPYTER_NO_CONFIG",
        }:
            monkeypatch.delenv(name)
    return folder


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when it left a container or volume behind.

    On an engine that nobody else uses (``SANDBOX_TEST_EXCLUSIVE=1``, as in CI) everything of
    sandbox-kernel counts; on a shared one only what carries this run's own label.
    """
    if hasattr(session.config, "workerinput"):
        return
    try:
        engines = find_engines()
    except MissingEngineError:
        return
    exclusive = os.environ.get("SANDBOX_TEST_EXCLUSIVE") == "1"
    label = VERSION_LABEL if exclusive else f"{RUN_LABEL}={os.environ['SANDBOX_TEST_RUN']}"
    deadline = time.monotonic() + LEFTOVER_BOUND
    while (left := leftovers(engines, label)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not left:
        return
    remove_leftovers(engines, label)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.section("left on the test engine", red=True)
        for line in left:
            reporter.line(line)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> object:
    """Show, with a failed test, the state of the run's containers."""
    report = yield
    if report.when == "call" and report.failed:
        try:
            found = leftovers(find_engines(), VERSION_LABEL)
        except (MissingEngineError, OSError, LookupError):
            found = []
        if found:
            report.sections.append(("containers and volumes", "\n".join(found)))
    return report
