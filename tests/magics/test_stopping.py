"""Stopping: the Stop button, kills from elsewhere, background runs, and the end of the kernel."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import Engines, wait_until
from tests.magics.conftest import Open
from tests.magics.notebook import Notebook, sandboxes

HOSTILE = """%%sandbox
trap '' INT TERM HUP
setsid sleep 7901 &
(setsid sh -c 'trap "" INT TERM; sleep 7902' >/dev/null 2>&1 &)
env -i setsid sleep 7903 >/dev/null 2>&1 </dev/null &
sleep 0.3
echo up
while :; do sleep 7904; done
"""


def sleepers(engines: Engines, prefix: str) -> list[str]:
    """What sleeps in the sandboxes, looked at from outside."""
    found = []
    for container in sandboxes(engines, prefix):
        with contextlib.suppress(LookupError):
            top = engines.api.get(f"/containers/{container['Id']}/top")
            found += [p[-1] for p in top["Processes"] if re.search(r"\bsleep 79\d\d", p[-1])]
    return found


def test_stop_ends_the_cell_and_all_that_it_started(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """Acceptance: Stop kills what ignores signals and what left the group; nothing stays."""
    began: list[float] = []
    cell = notebook.run(HOSTILE, interrupt_at="up", seen=lambda c: _since(began, c, "up"))
    took = time.monotonic() - began[0]
    assert cell.error[0] == "KeyboardInterrupt"
    assert "nothing of it runs any more" in cell.error[1]
    assert sleepers(engines, prefix) == []
    # The grace is 2 s; a busy machine takes its time for the rest.
    assert took < 8
    assert notebook.ask("(_sandbox.reason, _sandbox.stdout)") == ("interrupted", "up\n")
    assert notebook.run("%%sandbox\necho again", ok=True).out == "again\n"


def test_a_program_that_heeds_the_interrupt_may_end_by_itself(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """While it runs, 3: INT first; what it detached is ended all the same."""
    script = """%%sandbox
setsid sleep 7911 >/dev/null 2>&1 </dev/null &
trap 'echo tidied; exit 5' INT
echo up
sleep 7912 & wait
"""
    cell = notebook.run(script, interrupt_at="up")
    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.out == "up\ntidied\n"
    assert notebook.ask("(_sandbox.reason, _sandbox.returncode)") == ("interrupted", 5)
    assert sleepers(engines, prefix) == []


def test_a_second_stop_skips_the_grace_but_not_the_kill(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """While it runs, 3."""
    again: list[float] = []

    def press(cell: Any) -> None:
        if (
            "up" in cell.out
            and len(again) < 2
            and (not again or time.monotonic() > again[-1] + 0.3)
        ):
            again.append(time.monotonic())
            notebook.manager.interrupt_kernel()

    cell = notebook.run(HOSTILE, seen=press)
    assert cell.error[0] == "KeyboardInterrupt"
    assert "nothing of it runs any more" in cell.error[1]
    assert sleepers(engines, prefix) == []


def test_run_all_stops_with_the_cell(notebook: Notebook) -> None:
    """Peers 14: the cells after the one that was stopped do not run."""
    first = notebook.client.execute(
        "%%sandbox\necho up; sleep 7921", stop_on_error=True, allow_stdin=False
    )
    second = notebook.client.execute("ran = True", stop_on_error=True, allow_stdin=False)
    while True:
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and "up" in message["content"]["text"]:
            break
    notebook.manager.interrupt_kernel()
    replies = {}
    while len(replies) < 2:
        reply = notebook.client.get_shell_msg(timeout=60)
        replies[reply["parent_header"]["msg_id"]] = reply["content"]["status"]
    assert replies[first] == "error"
    assert replies[second] == "aborted"
    assert notebook.run("ran").error[0] == "NameError"


def test_stop_while_the_sandbox_is_being_made(open_one: Open, engines: Engines) -> None:
    """While it runs, 3: before anything runs too, and nothing stays."""
    with open_one() as notebook:
        cell = notebook.run(
            "import threading, _thread\nthreading.Timer(0.05, _thread.interrupt_main).start()\n"
            "get_ipython().run_cell_magic('sandbox', '', 'sleep 7931')"
        )
        assert cell.error[0] == "KeyboardInterrupt"
        assert notebook.run("%%sandbox\necho well", ok=True).out == "well\n"


def test_a_kill_from_a_subshell_ends_a_busy_cell(notebook: Notebook) -> None:
    """Acceptance: kill from a subshell."""
    client = notebook.client
    client.control_channel.send(client.session.msg("create_subshell_request", {}))
    answer = client.get_control_msg(timeout=30)
    subshell = answer["content"]["subshell_id"]
    try:

        def kill(cell: Any) -> None:
            if "up" not in cell.out or killed:
                return
            content = {
                "code": "%sandbox_kill", "silent": False, "store_history": False,
                "user_expressions": {}, "allow_stdin": False, "stop_on_error": False,
            }  # fmt: skip
            message = client.session.msg("execute_request", content)
            message["header"]["subshell_id"] = subshell
            client.shell_channel.send(message)
            killed.append(message["header"]["msg_id"])

        killed: list[str] = []
        cell = notebook.run("%%sandbox\necho up; sleep 7941", seen=kill)
        assert cell.error[0] == "SandboxRunError"
        assert "killed" in cell.error[1]
        assert notebook.ask("_sandbox.reason") == "killed"
    finally:
        message = client.session.msg("delete_subshell_request", {"subshell_id": subshell})
        client.control_channel.send(message)
        client.get_control_msg(timeout=30)


def test_a_run_in_the_background_has_a_handle(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """Magics: `--bg --proc`: wait, tail, kill, result; logs, attach; the cell returns at once."""
    cell = notebook.run(
        "%%sandbox --bg --proc job --name training\necho one; sleep 0.5; echo two", ok=True
    )
    assert re.search(r"r\d+ runs in the background", cell.out)
    assert notebook.ask("job.wait(30).stdout") == "one\ntwo\n"
    assert notebook.ask("(job.result.ok, job.running, job.tail(1))") == (True, False, "two")
    assert notebook.run("%sandbox_logs -n 1 training", ok=True).out == "two\n"
    assert "two" in notebook.run("job", ok=True).of("execute_result")[0]["data"]["text/html"]

    notebook.run(
        "%%sandbox --bg --proc job\ntrap '' TERM; echo up; while :; do sleep 7951; done", ok=True
    )
    wait_until(lambda: notebook.ask("job.tail()") == "up", 30, "the background run")
    with_timeout = notebook.run("job.wait(0.1)")
    assert with_timeout.error[0] == "TimeoutError"
    notebook.run("job.kill('TERM')", ok=True)
    assert notebook.ask("job.running") is True
    notebook.run("%sandbox_kill", ok=True)
    assert notebook.ask("(job.running, job.result.reason)") == (False, "killed")
    assert sleepers(engines, prefix) == []

    notebook.run("%sandbox_run --bg --proc fresh -- sh -c 'echo far; sleep 1; echo away'", ok=True)
    attached = notebook.run("%sandbox_attach", ok=True)
    assert attached.out.endswith("away\n")
    wrong = notebook.run("%sandbox_attach r0")
    assert wrong.error[0] == "UsageError"


def test_a_notebook_sees_a_run_in_the_background_live(notebook: Notebook) -> None:
    """Magics: `--bg` shows one display of the run, which changes until its end."""
    script = "for i in 1 2 3 4; do echo line $i; sleep 0.7; done"
    first = notebook.run(f"%%sandbox --bg --proc job\n{script}", answers=[])
    assert len(first.displays) == 1
    # Updates belong to the cell that started it, so another one is asked for all there are.
    seen: list[str] = []
    deadline = time.monotonic() + 60
    while not any("exit 0" in text for text in seen) and time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            message = notebook.client.get_iopub_msg(timeout=1)
            if message["msg_type"] == "update_display_data":
                seen.append(message["content"]["data"]["text/html"])
    assert "exit 0" in seen[-1]
    assert any("line 1" in text and "line 4" not in text for text in seen)


def test_a_run_that_cannot_start_tells_whoever_waits(notebook: Notebook) -> None:
    """Magics: errors of a run in the background."""
    notebook.run("%sandbox_run --bg --proc job --image nobody/nothing:2 true", ok=True)
    assert notebook.run("job.wait(30)").error[0] == "SandboxImageMissingError"


def test_the_session_ends_on_request(notebook: Notebook, engines: Engines, prefix: str) -> None:
    """Magics: `%sandbox_kill --session` asks, where somebody can answer."""
    notebook.run("%%sandbox\necho x > file", ok=True)
    unasked = notebook.run("%sandbox_kill --session")
    assert unasked.error[0] == "UsageError"
    assert "-y" in unasked.error[1]
    no = notebook.run("%sandbox_kill --session", answers=["no"])
    assert len(no.asked) == 1
    assert "nothing was done" in no.out
    assert notebook.run("%%sandbox\ncat file", ok=True).out == "x\n"
    yes = notebook.run("%sandbox_kill --session", answers=["yes"])
    assert "has ended" in yes.out
    assert sandboxes(engines, prefix) == []
    assert notebook.run("%%sandbox\nls", ok=True).out == ""


def test_a_session_that_has_ended_is_made_anew(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """Magics: a session that somebody removed is not an error of the next cell, but is told."""
    notebook.run("%%sandbox\ntrue", ok=True)
    for container in sandboxes(engines, prefix):
        engines.api.remove(container["Id"])
    cell = notebook.run("%%sandbox\necho new", ok=True)
    assert cell.out == "new\n"
    assert "new session" in cell.err


@pytest.fixture
def lone_prefix(engines: Engines) -> Iterator[str]:
    from tests.magics.notebook import no_sandbox_left

    name = f"sbx-magics-{uuid.uuid4().hex[:8]}-"
    yield name
    no_sandbox_left(engines, name)


@pytest.mark.parametrize("how", ["shutdown", "restart", "kill -9", "unload"])
def test_sandboxes_end_with_their_kernel(
    open_one: Open, engines: Engines, lone_prefix: str, how: str
) -> None:
    """Issue 6: kernel restart and `kill -9` of the kernel end session and runs, by the lease."""
    with open_one(SANDBOX_DOCKER_PREFIX=lone_prefix) as notebook:
        notebook.run("%%sandbox\ntrue", ok=True)
        notebook.run("%sandbox_run --bg -- sleep 7961", ok=True)
        running = lambda: [c for c in sandboxes(engines, lone_prefix) if c["State"] == "running"]  # noqa: E731
        wait_until(lambda: len(running()) == 2, 30, "both sandboxes")
        if how == "shutdown":
            notebook.manager.shutdown_kernel()
        elif how == "restart":
            notebook.manager.restart_kernel()
            notebook.client.wait_for_ready(timeout=60)
        elif how == "kill -9":
            notebook.manager.signal_kernel(signal.SIGKILL)
        else:
            notebook.run("%unload_ext sandbox_magics", ok=True)
        wait_until(lambda: not sandboxes(engines, lone_prefix), 30, "the end of both sandboxes")
        if how == "unload":
            assert notebook.run("%sandbox_run true").error[0] == "UsageError"
            notebook.run("%load_ext sandbox_magics\n%sandbox_run true", ok=True)


def _since(began: list[float], cell: Any, text: str) -> None:
    if not began and text in cell.out:
        began.append(time.monotonic())
