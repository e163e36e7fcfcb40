"""A notebook's front end for tests: a real ipykernel, and what each of its cells gave."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from tests.engines import Engines, wait_until

PATIENCE = 60.0


@dataclass
class Cell:
    """What a cell gave: its messages, and what can be told from them."""

    messages: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The contents of the messages of a type."""
        return [m["content"] for _, m in self.messages if m["msg_type"] == kind]

    def stream(self, name: str) -> str:
        """What was shown of a stream."""
        return "".join(c["text"] for c in self.of("stream") if c["name"] == name)

    @property
    def out(self) -> str:
        return self.stream("stdout")

    @property
    def err(self) -> str:
        return self.stream("stderr")

    @property
    def error(self) -> tuple[str, str]:
        """Name and text of the error; empty when there was none."""
        reply = self.reply
        return (reply["ename"], reply["evalue"]) if reply["status"] == "error" else ("", "")

    @property
    def traceback(self) -> str:
        return "\n".join(self.reply.get("traceback") or ())

    @property
    def value(self) -> str:
        """The text of the cell's value."""
        found = self.of("execute_result")
        return str(found[0]["data"]["text/plain"]) if found else ""

    @property
    def displays(self) -> list[dict[str, Any]]:
        """The data of everything that was displayed, in order; updates are apart."""
        return [c["data"] for c in self.of("display_data")]

    @property
    def footer(self) -> str:
        """The text of the last display."""
        return str(self.displays[-1]["text/plain"]) if self.displays else ""


class Notebook:
    """A kernel with the extension loaded, and a client of it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def run(
        self,
        code: str,
        *,
        answers: list[str] | None = None,
        interrupt_at: str = "",
        seen: Callable[[Cell], None] | None = None,
        ok: bool = False,
    ) -> Cell:
        """Run a cell to its end.

        Parameters
        ----------
        answers
            What somebody who is there types, at one question after the other, and then nothing;
            `None`: nobody is there.
        interrupt_at
            Text of the output at which the kernel is interrupted, once.
        seen
            Called after each message.
        ok
            Whether an error fails the test.
        """
        cell = Cell()
        began = time.monotonic()
        asked = self.client.execute(code, allow_stdin=answers is not None, stop_on_error=False)
        idle = False
        while not idle or not cell.reply:
            assert time.monotonic() < began + PATIENCE, f"the cell did not end: {code!r}"
            idle = self._listen(cell, asked, began) or idle
            if interrupt_at and interrupt_at in cell.out:
                interrupt_at = ""
                self.manager.interrupt_kernel()
            if seen is not None:
                seen(cell)
            if answers is not None:
                self._answer(cell, answers)
            if idle:
                reply = self.client.get_shell_msg(timeout=PATIENCE)
                while reply["parent_header"].get("msg_id") != asked:
                    reply = self.client.get_shell_msg(timeout=PATIENCE)
                cell.reply = reply["content"]
        cell.seconds = time.monotonic() - began
        if ok:
            assert cell.reply["status"] == "ok", cell.error
        return cell

    def _listen(self, cell: Cell, asked: str, began: float) -> bool:
        with contextlib.suppress(queue.Empty):
            message = self.client.get_iopub_msg(timeout=0.1)
            if message["parent_header"].get("msg_id") != asked:
                return False
            cell.messages.append((time.monotonic() - began, message))
            content = message["content"]
            return message["msg_type"] == "status" and content["execution_state"] == "idle"
        return False

    def _answer(self, cell: Cell, answers: list[str]) -> None:
        with contextlib.suppress(queue.Empty):
            message = self.client.get_stdin_msg(timeout=0.01)
            cell.asked.append(message["content"]["prompt"])
            if answers:
                self.client.input(answers.pop(0))

    def ask(self, expression: str) -> Any:
        """Return the value of an expression; it must have a plain `repr`."""
        cell = self.run(expression, ok=True)
        return eval(cell.value)


@contextlib.contextmanager
def open_notebook(folder: Path, env: Mapping[str, str], *, load: bool = True) -> Iterator[Notebook]:
    """Start a kernel of this Python, and end it."""
    manager = KernelManager()
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="test",
        language="python",
    )
    whole = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), **env}
    manager.start_kernel(cwd=str(folder), env=whole)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE)
        notebook = Notebook(manager, client)
        if load:
            notebook.run("%load_ext sandbox_magics", ok=True)
        yield notebook
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel()


def sandboxes(engines: Engines, prefix: str) -> list[dict[str, Any]]:
    """Return the containers whose names begin with a prefix."""
    found = engines.api.get("/containers/json", all=1)
    return [c for c in found if any(n.lstrip("/").startswith(prefix) for n in c["Names"])]


def no_sandbox_left(engines: Engines, prefix: str) -> None:
    """Wait until there is none, and remove those that stay."""
    try:
        wait_until(lambda: not sandboxes(engines, prefix), 30, "the end of all sandboxes")
    finally:
        for left in sandboxes(engines, prefix):
            engines.api.remove(left["Id"])
