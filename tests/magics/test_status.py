"""`%sandbox_status`: a picture as text, HTML and data; a dead engine is in it, not an error."""

from __future__ import annotations

import re

from tests.engines import Engines
from tests.magics.conftest import Open
from tests.magics.notebook import Notebook


def test_status_before_and_after_the_first_use(open_one: Open) -> None:
    """Acceptance: status as text and HTML; nothing is started by looking."""
    with open_one() as notebook:
        before = notebook.run("%sandbox_status", ok=True)
        assert "shape A" in before.value.splitlines()[0]
        assert re.search(r"^engine +ok  unix:///", before.value, re.M)
        assert re.search(r"^session +none", before.value, re.M)
        assert re.search(r"^runs +none yet", before.value, re.M)
        assert re.search(r"^image +ready", before.value, re.M)
        notebook.run("%%sandbox\ntrue", ok=True)
        notebook.run("%%sandbox --no-raise-error --name broken\nexit 3", ok=True)
        after = notebook.run("%sandbox_status", ok=True)
        data = after.of("execute_result")[0]["data"]
        text = data["text/plain"]
        assert re.search(
            r"^session +sbx-\S+  running  image \S+ \(sha256:\w+\)  net none", text, re.M
        )
        assert re.search(r"^limits +mem \S+ \S+ of \S+ \S+  cpu .*  pids \d+ of 256", text, re.M)
        assert re.search(r"r2 broken  exit 3", text)
        assert "<table" in data["text/html"]
        assert "<script" not in data["text/html"]
        assert data["application/json"]["runs"][0]["returncode"] == 3
        notebook.run("known = %sandbox_status --json", ok=True)
        known = notebook.ask("(known['shape'], known['session']['network'])")
        assert known == ("A", "none")


def test_a_run_in_progress_is_shown_from_elsewhere(notebook: Notebook) -> None:
    """Status: what runs, for how long, and on which network."""
    notebook.run("%%sandbox --bg --proc job --name slow\nsleep 7981", ok=True)
    try:
        text = notebook.run("%sandbox_status -v", ok=True).value
        assert re.search(r"r\d+ slow  running  sleep 7981  \S+ s  net none", text)
    finally:
        notebook.run("job.kill()", ok=True)


def test_names_and_commands_cannot_break_the_picture(notebook: Notebook) -> None:
    """KMS-13: everything of a run is one printable line, and escaped in HTML."""
    cell = notebook.run(
        "%%sandbox -q --no-raise-error --name '<b>\x1b[2J'\n<img src=x> \u202e; exit 1", ok=True
    )
    assert cell.out == ""
    data = notebook.run("%sandbox_status", ok=True).of("execute_result")[0]["data"]
    assert "\x1b" not in data["text/plain"]
    assert "\u202e" not in data["text/plain"]
    assert "<b>" not in data["text/html"]
    assert "<img" not in data["text/html"]


def test_a_dead_engine_gives_a_status(open_one: Open, engines: Engines) -> None:
    """Status: never an exception, with the reason and what to do."""
    with open_one(SANDBOX_DOCKER_HOST="unix:///nowhere/docker.sock") as notebook:
        cell = notebook.run("%sandbox_status", ok=True)
        assert re.search(r"^engine .*nowhere.* → ", cell.value, re.M)
        assert cell.seconds < 30
    with open_one(SANDBOX_DOCKER_IMAGE="nobody/nothing:1") as notebook:
        missing = notebook.run("%sandbox_status", ok=True).value
        assert "nobody/nothing:1 missing → %sandbox_build" in missing


def test_watching_updates_one_display_until_it_is_interrupted(notebook: Notebook) -> None:
    """Status: `--watch`."""

    def stop(cell: object) -> None:
        updates = getattr(cell, "of")("update_display_data")  # noqa: B009
        if len(updates) == 2:
            notebook.manager.interrupt_kernel()

    cell = notebook.run("%sandbox_status --watch 0.5", seen=stop, ok=True)
    assert len(cell.displays) == 1
    assert len(cell.of("update_display_data")) >= 2
