"""C5: the network for one run, when a person says yes to it; nobody to ask means no."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from sandbox_magics.consent import Question

from tests.engines import Engines
from tests.magics.conftest import Open
from tests.magics.notebook import Notebook, sandboxes

CELL = "%%sandbox -n\ncat /proc/net/dev"


def made(notebook: Notebook) -> int:
    """How many sandboxes the kernel has asked the engine for, since its start."""
    count = "[v for k, v in vars(__import__('tests_counter')).items() if k == 'made'][0]"
    return int(notebook.ask(count))


COUNTER = """
import sys, types
from sandbox_kernel.sandbox.live import LiveSandbox
counter = sys.modules['tests_counter'] = types.ModuleType('tests_counter')
counter.made = 0
inner = LiveSandbox._make.__func__
async def counted(cls, *args, **kwargs):
    counter.made += 1
    return await inner(cls, *args, **kwargs)
LiveSandbox._make = classmethod(counted)
"""


def test_yes_gives_the_network_to_one_run(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """C5: asked once, with what runs; a sandbox of its own; the session stays without network."""
    cell = notebook.run(CELL, answers=["yes"])
    assert cell.error == ("", "")
    assert "eth0" in cell.out
    assert len(cell.asked) == 1
    assert "cat /proc/net/dev" in cell.asked[0]
    assert "egress" in cell.asked[0]
    assert "at most 2m00s" in cell.asked[0]
    assert "network egress" in cell.footer
    assert notebook.ask("(_sandbox.network, _sandbox.consent.by)") == ("egress", "a person")
    assert sandboxes(engines, prefix) == []
    assert "eth0" not in notebook.run("%%sandbox\ncat /proc/net/dev", ok=True).out
    again = notebook.run(CELL, answers=["no"])
    assert len(again.asked) == 1
    assert again.error[0] == "SandboxNetworkDenied"


@pytest.mark.parametrize("answer", ["no", "", "y", "YES!", "yes please", "\x04"])
def test_anything_but_yes_starts_nothing(notebook: Notebook, answer: str) -> None:
    """C5: every other answer, and the end of input, is a no; also with `--no-raise-error`."""
    if "tests_counter" not in notebook.run("print(list(__import__('sys').modules))").out:
        notebook.run(COUNTER, ok=True)
    before = made(notebook)
    cell = notebook.run(CELL.replace("-n", "-n --no-raise-error"), answers=[answer])
    assert cell.error[0] == "SandboxNetworkDenied"
    assert "Nothing was started" in cell.error[1]
    assert made(notebook) == before


def test_silence_and_stop_are_a_no(notebook: Notebook) -> None:
    """Network approval: 120 s, here shortened; the Stop button."""
    module = "__import__('sandbox_magics.consent').consent"
    notebook.run(f"{module}.PATIENCE = 0.7", ok=True)
    try:
        cell = notebook.run(CELL, answers=[])
        assert cell.error[0] == "SandboxNetworkDenied"
        assert "no answer" in cell.error[1]
        notebook.run(f"{module}.PATIENCE = 120", ok=True)
        pressed: list[bool] = []

        def press(cell: object) -> None:
            if getattr(cell, "asked", None) and not pressed:
                pressed.append(True)
                notebook.manager.interrupt_kernel()

        assert notebook.run(CELL, answers=[], seen=press).error[0] == "SandboxNetworkDenied"
    finally:
        notebook.run(f"{module}.PATIENCE = 120.0", ok=True)


def test_nobody_to_ask_means_no(notebook: Notebook) -> None:
    """C5: no stdin, no network, nothing created; the text says what an administrator can do."""
    cell = notebook.run(CELL)
    assert cell.error[0] == "SandboxNetworkDenied"
    assert "nobody can be asked here" in cell.error[1]
    assert "File" not in cell.traceback
    assert hashlib.sha256(CELL.encode()).hexdigest() in cell.error[1]
    line = notebook.run("x = 'true'\n%sandbox_run -n {x}")
    assert line.error[0] == "SandboxNetworkDenied"
    assert "values of variables" in line.error[1]


def test_a_notebook_cannot_say_yes_by_itself(notebook: Notebook) -> None:
    """Network approval: neither by a variable, nor by an `input` of its own."""
    forged = (
        "import builtins, io, sys, os\n"
        "builtins.input = input = lambda *a: 'yes'\n"
        "sys.stdin = io.StringIO('yes\\n')\n"
        "os.environ['SANDBOX_DOCKER_NETWORK'] = 'egress'\n"
        "yes = True\n"
    )
    notebook.run(forged, ok=True)
    try:
        assert notebook.run(CELL).error[0] == "SandboxNetworkDenied"
        assert notebook.run(CELL, answers=["no"]).error[0] == "SandboxNetworkDenied"
        shown = notebook.run("%%sandbox --fresh\ncat /proc/net/dev", ok=True).out
        assert "eth0" not in shown
    finally:
        notebook.run("del os.environ['SANDBOX_DOCKER_NETWORK'], input", ok=True)


def test_the_flags_agree(notebook: Notebook) -> None:
    """Network approval: the session's sandbox is never put on a network."""
    cell = notebook.run("%%sandbox -n --session\ntrue", answers=["yes"])
    assert cell.error[0] == "UsageError"
    assert cell.asked == []


def test_a_policy_can_forbid_it_before_anybody_is_asked(open_one: Open, tmp_path: Path) -> None:
    """A1: the policy's ceiling."""
    write_policy(tmp_path, {"network": "none"})
    with open_one(JUPYTER_CONFIG_DIR=str(tmp_path / "config")) as notebook:
        cell = notebook.run(CELL, answers=["yes"])
        assert cell.error[0] == "SandboxNetworkDenied"
        assert "policy" in cell.error[1]
        assert cell.asked == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's files can consent for others")
def test_a_policy_can_allow_exactly_one_cell(open_one: Open, tmp_path: Path) -> None:
    """C5: by the digest of the cell's text; no other cell, nor this one with another line."""
    digest = hashlib.sha256(CELL.encode()).hexdigest()
    write_policy(tmp_path, {"network_consents": [{"cell_sha256": digest}]})
    with open_one(JUPYTER_CONFIG_DIR=str(tmp_path / "config")) as notebook:
        assert "eth0" in notebook.run(CELL, ok=True).out
        assert notebook.ask("_sandbox.consent.by") == "policy"
        for other in (f"{CELL} -x", CELL.replace("-n", "-n -q"), CELL.replace("%%", "%%", 1) + " "):
            assert notebook.run(other).error[0] == "SandboxNetworkDenied", other


def write_policy(folder: Path, policy: dict[str, object]) -> None:
    config = folder / "config"
    config.mkdir(mode=0o755)
    (config / "jupyter_sandbox_policy.json").write_text(json.dumps(policy))


def test_batch_runs_fail_closed(kernel_env: dict[str, str], tmp_path: Path) -> None:
    """Acceptance: nbclient, and with it nbconvert and papermill, have nobody to ask."""
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell("%load_ext sandbox_magics"),
        nbformat.v4.new_code_cell("%%sandbox\necho plain"),
        nbformat.v4.new_code_cell(CELL),
        nbformat.v4.new_code_cell("after = True"),
    ]
    client = NotebookClient(book, timeout=60, kernel_name="python3")
    with pytest.raises(CellExecutionError, match="SandboxNetworkDenied"):
        client.execute(env={**os.environ, **kernel_env}, cwd=str(tmp_path))
    assert book.cells[1].outputs[0]["text"] == "plain\n"
    assert book.cells[3].execution_count is None


def test_papermill_fails_closed(kernel_env: dict[str, str], tmp_path: Path) -> None:
    """Acceptance: papermill; a parameter cannot say yes."""
    spec = {"name": "python3", "display_name": "", "language": "python"}
    book = nbformat.v4.new_notebook(metadata={"kernelspec": spec})
    book.cells = [
        nbformat.v4.new_code_cell("answer = 'no'", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("%load_ext sandbox_magics"),
        nbformat.v4.new_code_cell(CELL),
    ]
    nbformat.write(book, tmp_path / "in.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", "-p", "answer", "yes"],
        cwd=tmp_path,
        env={**os.environ, **kernel_env},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert "SandboxNetworkDenied" in done.stderr


def test_the_question_shows_what_could_hide_something() -> None:
    """Network approval: control characters and a cut are shown; the digest is the source's."""
    question = Question(
        source="%%sandbox -n\nx\n\n", command="a\x1b[2K\rb\n\u202ec" + "z" * 300, image="i",
        timeout=90,
    )  # fmt: skip
    assert "a\\x1b[2K\\rb⏎\\u202ec" in question.text
    assert "\x1b" not in question.text
    assert "characters more" in question.text
    assert question.digest == hashlib.sha256(b"%%sandbox -n\nx").hexdigest()
