"""Files beside the notebook (K9): nothing of them, a snapshot, and the line that says so."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.kernel.beside import Beside
from sandbox_kernel.kernel.launch_error import KernelLaunchError
from sandbox_kernel.kernel.zmtp import ZmtpLimiter
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.owner import current_owner
from sandbox_kernel.sandbox.workspace import workspace_name
from tests.engines import Engines
from tests.kernel.conftest import MakeManager, connect, evaluate, sandbox_spec

LISTED = "import json, os\nprint(json.dumps(sorted(os.listdir())))"


@pytest.fixture
def endpoint(engines: Engines) -> Endpoint:
    """One way to the engine: here it makes no difference."""
    return engines.unix_endpoint


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    """A notebook's folder."""
    folder = tmp_path / "notebooks"
    for name in ("data.csv", "n.ipynb", "code/lib.py", "secret.pem", ".ipynb_checkpoints/n.ipynb"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    (folder / ".gitignore").write_text("*.pem\n")
    return folder


async def outputs(client: AsyncKernelClient, code: str) -> list[dict[str, Any]]:
    """Run code and return what its cell shows."""
    shown: list[dict[str, Any]] = []
    await client.execute_interactive(code, output_hook=shown.append, timeout=60)
    return [message for message in shown if message["msg_type"] in ("error", "stream")]


async def test_a_new_workspace_begins_as_the_notebooks_folder(
    make_manager: MakeManager, notebooks: Path, engines: Engines
) -> None:
    """K9: ignore rules applied; writes stay inside; what has content is not overwritten."""
    key = f"files-{uuid.uuid4().hex}"
    settings = {"files": "snapshot", "workspace": key}
    volume = workspace_name("sbx-", current_owner(), key)
    try:
        first = make_manager(**settings)
        await first.start_kernel(cwd=str(notebooks))
        client = await connect(first)
        assert await evaluate(client, LISTED) == [".gitignore", "code", "data.csv", "n.ipynb"]
        assert await evaluate(client, "print(open('data.csv').read())") == 1
        await evaluate(client, "n = open('data.csv', 'w').write('2')")
        client.stop_channels()
        await first.shutdown_kernel(now=True)
        assert (notebooks / "data.csv").read_text() == "1"
        (notebooks / "later.csv").write_text("3")
        second = make_manager(**settings)
        await second.start_kernel(cwd=str(notebooks))
        client = await connect(second)
        assert "later.csv" not in await evaluate(client, LISTED)
        assert await evaluate(client, "print(open('data.csv').read())") == 2
        client.stop_channels()
        await second.shutdown_kernel(now=True)
    finally:
        engines.api.remove_volume(volume)


async def test_the_first_file_that_is_missing_and_lies_beside_the_notebook_is_explained(
    make_manager: MakeManager, notebooks: Path
) -> None:
    """K9: one line after the error, once, on this side only; nothing of the folder is inside."""
    manager = make_manager()
    await manager.start_kernel(cwd=str(notebooks))
    client = await connect(manager)
    assert await evaluate(client, LISTED) == []
    for code in ("open('nowhere.csv')", "open('code')", "open('/workspace/data.csv')"):
        assert [m["msg_type"] for m in await outputs(client, code)] == ["error"]
    error, line = await outputs(client, "open('data.csv')")
    assert (error["msg_type"], line["msg_type"]) == ("error", "stream")
    assert line["content"]["text"].count("\n") == 1
    assert "'data.csv'" in line["content"]["text"]
    assert 'files = "snapshot"' in line["content"]["text"]
    assert [m["msg_type"] for m in await outputs(client, "open('n.ipynb')")] == ["error"]
    client.stop_channels()


@pytest.mark.parametrize("setting", [{"files": "snapshot"}, {"template": "."}, {"project": "."}])
async def test_a_policy_keeps_the_files_of_the_machine_out(
    setting: dict[str, str], config_folder: Path, notebooks: Path
) -> None:
    """K9, A1: before anything is dialled."""
    text = json.dumps({"allow_host_files": False})
    (config_folder / "jupyter_sandbox_policy.json").write_text(text)
    manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
    manager._kernel_spec = sandbox_spec(Endpoint("unix:///nonexistent"), **setting)
    with pytest.raises(KernelLaunchError, match="lets no files of this machine"):
        await manager.start_kernel(cwd=str(notebooks))


async def test_a_folder_that_is_too_large_is_refused(notebooks: Path, engines: Engines) -> None:
    """K9: the limit holds, and its setting is named; a template beside it is refused."""
    (notebooks / "big.bin").write_bytes(bytes(2 << 20))
    for more, said in (({"template_limit": "1M"}, "template_limit"), ({"template": "."}, "both")):
        manager = AsyncKernelManager(kernel_id=uuid.uuid4().hex)
        manager._kernel_spec = sandbox_spec(engines.unix_endpoint, files="snapshot", **more)
        with pytest.raises(KernelLaunchError, match=said):
            await manager.start_kernel(cwd=str(notebooks))
        assert not engines.api.containers(f"{labels.KERNEL}={manager.kernel_id}")


def error_parts(ename: str, evalue: str, cell: str = "c") -> list[bytes]:
    """Return an error as a kernel sends it."""
    header, parent = {"msg_type": "error"}, {"msg_id": cell}
    content = {"ename": ename, "evalue": evalue, "traceback": []}
    return [
        b"error", b"<IDS|MSG>", b"", json.dumps(header).encode(), json.dumps(parent).encode(),
        b"{}", json.dumps(content).encode(),
    ]  # fmt: skip


def missing(name: str, cell: str = "c") -> list[bytes]:
    return error_parts("FileNotFoundError", f"[Errno 2] No such file or directory: {name!r}", cell)


def test_a_kernel_that_guesses_names_learns_next_to_nothing(notebooks: Path) -> None:
    """K9: no path, no hidden name, no folder; a few looks, and one answer in all."""
    (notebooks / ".env").write_text("")
    (notebooks.parent / "above.csv").write_text("")
    for name in ("../above.csv", "code/lib.py", ".env", "code", "data.csv\0", "/etc/passwd"):
        assert Beside(notebooks).after(missing(name)) == b""
    guesser = Beside(notebooks)
    assert [guesser.after(missing(f"{n}.csv")) for n in range(16)] == [b""] * 16
    assert guesser.after(missing("data.csv")) == b""
    asked = Beside(notebooks)
    assert asked.after(missing("./data.csv")) == asked.after(missing("data.csv")) != b""
    assert asked.after(missing("data.csv", cell="another")) == b""
    assert Beside(notebooks).after(error_parts("OSError", "'data.csv'")) == b""


@given(st.lists(st.binary(max_size=60), max_size=8), st.binary(max_size=60))
def test_whatever_a_kernel_sends_does_no_harm(parts: list[bytes], content: bytes) -> None:
    """K9"""
    beside = Beside("/nonexistent")
    assert beside.after(parts) == b""
    assert beside.after([b"<IDS|MSG>", b"", b'{"msg_type": "error"}', *parts, content]) == b""


def test_an_error_is_followed_within_the_stream() -> None:
    """K9: between this message and the next, also when both come in one piece."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

    def message(*parts: bytes) -> bytes:
        flags = [1] * (len(parts) - 1) + [0]
        return b"".join(bytes([f, len(p)]) + p for f, p in zip(flags, parts, strict=True))

    limiter = ZmtpLimiter(after_error=lambda parts: b"<" + parts[-1] + b">")
    error, other = message(b'"error"', b"content"), message(b'"stream"', b"text")
    assert (
        b"".join(limiter.feed(greeting + error + other)) == greeting + error + b"<content>" + other
    )
