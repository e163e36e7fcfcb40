"""Engines and sandboxes that break while a cell runs, and images that lack things."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import Engines, FaultProxy, wait_until
from tests.magics.conftest import Open
from tests.magics.notebook import Notebook, sandboxes


class Line:
    """A `FaultProxy` in a thread of its own, since a notebook of the tests blocks."""

    def __init__(self, engines: Engines, path: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._proxy = FaultProxy(engines, path)
        self.url = f"unix://{path}"
        self._do(self._proxy.start())

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.cut)

    def freeze(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.freeze)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._proxy.thaw)
        self._do(self._proxy.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def line(engines: Engines, tmp_path: Path) -> Iterator[Line]:
    made = Line(engines, tmp_path / "engine.sock")
    yield made
    made.close()


def test_a_line_that_breaks_is_no_result(open_one: Open, line: Line) -> None:
    """Acceptance: engine lost mid-run: never a made-up code, and the next cell works."""
    with open_one(SANDBOX_DOCKER_HOST=line.url) as notebook:
        cut: list[bool] = []

        def break_it(cell: Any) -> None:
            if "up" in cell.out and not cut:
                cut.append(True)
                line.cut()

        script = "%%sandbox --no-raise-error\necho up; sleep 8; exit 7"
        cell = notebook.run(script, seen=break_it)
        assert cell.out == "up\n"
        if cell.error[0] == "SandboxUnknownOutcome":
            assert notebook.ask("(_sandbox.reason, _sandbox.returncode)") == ("engine-lost", None)
        else:
            # The lease went with the line: that is known, and so is no code.
            assert "SandboxGoneError" in cell.error[0] or cell.error == ("", "")
            assert notebook.ask("(_sandbox.returncode,)") == (None,)
        assert notebook.run("%%sandbox\necho again", ok=True).out == "again\n"


def test_stop_gives_the_cell_back_when_the_engine_is_silent(open_one: Open, line: Line) -> None:
    """Acceptance: nothing waits for ever, and nothing is claimed that is not known."""
    with open_one(SANDBOX_DOCKER_HOST=line.url) as notebook:
        state: list[float] = []

        def freeze(cell: Any) -> None:
            if "up" in cell.out and not state:
                state.append(time.monotonic())
                line.freeze()
                notebook.manager.interrupt_kernel()

        cell = notebook.run("%%sandbox\necho up; sleep 7991", seen=freeze)
        assert cell.error[0] == "KeyboardInterrupt"
        assert "nothing of it runs" not in cell.error[1]
        assert time.monotonic() - state[0] < 45


def test_stop_ends_a_cell_whose_sandbox_somebody_has_paused(
    open_one: Open, engines: Engines
) -> None:
    """Acceptance: paused container; it is resumed, since nothing in it could end otherwise."""
    prefix = f"sbx-paused-{time.monotonic_ns()}-"
    with open_one(SANDBOX_DOCKER_PREFIX=prefix) as notebook:
        paused: list[str] = []

        def pause(cell: Any) -> None:
            if "up" in cell.out and not paused:
                paused.append(sandboxes(engines, prefix)[0]["Id"])
                engines.api.request("POST", f"/containers/{paused[0]}/pause")
                notebook.manager.interrupt_kernel()

        cell = notebook.run("%%sandbox\ntrap '' INT; echo up; sleep 7992", seen=pause)
        assert cell.error[0] == "KeyboardInterrupt"
        assert "nothing of it runs any more" in cell.error[1]
        assert notebook.run("%%sandbox\necho alive", ok=True).out == "alive\n"
    wait_until(lambda: not sandboxes(engines, prefix), 30, "the end of the sandbox")


def test_an_image_without_bash_runs_cells_with_its_sh(open_one: Open, busybox_image: str) -> None:
    """Acceptance: image without bash; strict all the same."""
    with open_one(SANDBOX_DOCKER_IMAGE=busybox_image) as notebook:
        assert notebook.run("%%sandbox\necho $((6*7)); id -u", ok=True).out == "42\n10001\n"
        assert notebook.run("%%sandbox\nfalse; echo no").error[0] == "SandboxRunError"
        assert notebook.run("%%sandbox\nfalse | true; echo no").error[0] == "SandboxRunError"
        cell = notebook.run("%%sandbox\ntrap '' INT; echo up; sleep 7993", interrupt_at="up")
        assert "nothing of it runs any more" in cell.error[1]


def test_a_hundred_and_one_runs_at_once(notebook: Notebook) -> None:
    """Acceptance: 101 streams at once; each gets its own output and code."""
    notebook.run("%config SandboxMagics.pids_limit = 2048", ok=True)
    notebook.run("%sandbox_kill --session -y", ok=True)
    try:
        start = (
            "jobs = []\nfor i in range(101):\n"
            "    get_ipython().run_cell_magic('sandbox', '--bg -q --proc job', "
            "f'sleep 8; echo {i}; exit {i % 100}')\n"
            "    jobs.append(job)\n"
        )
        notebook.run(start, ok=True)
        cell = notebook.run("results = [job.wait(100) for job in jobs]")
        assert cell.error == ("", "")
        told = notebook.ask("[(r.stdout, r.returncode) for r in results]")
        assert told == [(f"{i}\n", i % 100) for i in range(101)]
    finally:
        notebook.run("%config SandboxMagics.pids_limit = None", ok=True)
