"""Folders of the caller's machine in a sandbox: template and project (B10, B11)."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.process.files import Files
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.snapshot import ProjectRules
from sandbox_kernel.sandbox.spec import MIB, SandboxSpec
from tests.engines import Engines
from tests.sandbox.conftest import MakeSandbox, marks, sh


def fill(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{name}\n")


# -- which files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignore_files", "outside", "inside"),
    [
        ({}, [".git/config", "a/.git/", ".hg/x"], ["a", "a/b", ".github/x", "git"]),
        # A pattern of a .dockerignore begins at the folder itself ...
        ({".dockerignore": "# no\n\n  temp*\n/abs\n./x/\n"},
         ["temp", "temp.txt", "temp/a", "abs", "x/y"], ["a/temp", "a/abs"]),
        ({".dockerignore": "**/temp\n*.md\n!README.md\n"},
         ["a/b/temp", "temp", "x.md"], ["README.md", "a/x.md"]),
        ({".dockerignore": "a\n!a/keep\n"}, ["a/x"], ["a/keep"]),
        # ... one of a .gitignore anywhere below it.
        ({".gitignore": "temp\n/abs\n*.pyc\n!keep.pyc\n"},
         ["temp", "a/temp", "abs", "a/b/x.pyc", "temp/keep.pyc"], ["a/abs", "keep.pyc"]),
        ({"a/.gitignore": "x\n", ".gitignore": ""}, ["a/x", "a/b/x"], ["x", "b/x"]),
        ({".gitignore": "y\n", ".dockerignore": "x\n!y\n"}, ["x", "y", "a/y"], ["a/x"]),
        ({".dockerignore": "\ufeffx\r\ny\r\n"}, ["x", "y"], ["z"]),
    ],
)  # fmt: skip
def test_ignore_files_say_what_stays_outside(
    tmp_path: Path, ignore_files: dict[str, str], outside: list[str], inside: list[str]
) -> None:
    """B11."""
    for name, text in ignore_files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rules = ProjectRules(tmp_path)
    assert [path for path in outside if not rules.match_file(path)] == []
    assert [path for path in inside if rules.match_file(path)] == []


def test_an_ignore_file_that_is_none_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO, a link, a folder and one that may not be read."""
    os.mkfifo(tmp_path / ".gitignore")
    (tmp_path / ".dockerignore").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".gitignore").symlink_to("/etc/passwd")
    assert not ProjectRules(tmp_path).match_file("a/b")


# -- the project --------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    fill(folder, "src/main.py", "secret.env", "build/x.o", ".git/config", "data/small.csv")
    (folder / ".dockerignore").write_text("build\n")
    (folder / ".gitignore").write_text("*.env\n")
    (folder / "link").symlink_to("src/main.py")
    (folder / "src" / "private").write_text("private\n")
    (folder / "src" / "private").chmod(0o600)
    (folder / "run").write_text("#!/bin/sh\necho ran\n")
    (folder / "run").chmod(0o700)
    return folder


async def test_a_project_is_there_to_be_read_and_cannot_be_changed(
    make_sandbox: MakeSandbox, project: Path, engines: Engines
) -> None:
    """B11: no mount of the host's, and nothing of its path on the engine."""
    sandbox = await make_sandbox(project=str(project))
    listed = await sh(sandbox, "cd /project && find . | sort")
    assert listed.out.split() == [
        *(".", "./.dockerignore", "./.gitignore", "./data", "./data/small.csv", "./link"),
        *("./run", "./src", "./src/main.py", "./src/private"),
    ]
    read = await sh(sandbox, "cd /project && cat link src/private && ./run")
    assert read.out == "src/main.py\nprivate\nran\n"
    for change in (
        "echo x > /project/new",
        "echo x >> /project/run",
        "rm -rf /project/src",
        "chmod 777 /project",
        "mv /project/run /project/walk",
        "mkdir /project/d",
        "ln -s x /project/l",
        "mount -o remount,rw /project",
        "umount /project",
    ):
        assert (await sh(sandbox, change)).code != 0, change
    assert (await sh(sandbox, "cd /project && find . | sort")).out == listed.out
    inspected = engines.api.inspect(sandbox.id)
    assert inspected is not None
    assert str(project) not in str(inspected)
    assert [mount["Type"] for mount in inspected["Mounts"]] == ["volume"]


async def test_a_project_that_changes_afterwards_does_not_change_inside(
    make_sandbox: MakeSandbox, project: Path
) -> None:
    sandbox = await make_sandbox(project=str(project))
    (project / "data" / "small.csv").write_text("changed\n")
    assert (await sh(sandbox, "cat /project/data/small.csv")).out == "data/small.csv\n"


@pytest.mark.parametrize("setting", ["project", "template"])
@pytest.mark.parametrize("fault", ["missing", "file", "link"])
async def test_a_folder_that_cannot_be_copied_is_refused_before_anything_is_made(
    make_sandbox: MakeSandbox,
    engines: Engines,
    tmp_path: Path,
    workspace: str,
    setting: str,
    fault: str,
) -> None:
    """B10, B11: by the setting and the path."""
    folder = tmp_path / "x"
    if fault == "file":
        folder.write_text("")
    elif fault == "link":
        fill(folder, "a")
        (folder / "out").symlink_to("/etc")
    with pytest.raises(SandboxSpecRejectedError, match=f"{setting}.*{folder}"):
        await make_sandbox(durability="persistent", workspace=workspace, **{setting: str(folder)})
    label = f"{labels.WORKSPACE}={labels.key_text(workspace)}"
    assert engines.api.containers(label) == []
    assert engines.api.volumes(label) == []


async def test_a_project_that_is_too_large_is_refused_with_its_limit(
    make_sandbox: MakeSandbox, engines: Engines, tmp_path: Path
) -> None:
    """B11: what is left out does not count."""
    folder = tmp_path / "large"
    fill(folder, "a")
    (folder / "big").write_bytes(b"x" * (2 * MIB))
    with pytest.raises(SandboxSpecRejectedError, match="project_limit"):
        await make_sandbox(project=str(folder), project_limit=MIB)
    (folder / ".dockerignore").write_text("big\n")
    sandbox = await make_sandbox(project=str(folder), project_limit=MIB)
    assert (await sh(sandbox, "ls /project")).out == "a\n"


async def test_many_small_files_that_do_not_fit_are_refused_and_nothing_is_left(
    engine: Engine,
    engines: Engines,
    tmp_path: Path,
    python_image: str,
    run_labels: dict[str, str],
) -> None:
    """B11: each takes a page of memory."""
    folder = tmp_path / "many"
    fill(folder, *(f"d{n % 20}/f{n}" for n in range(400)))
    spec = SandboxSpec(image=python_image, project=str(folder), project_limit=MIB)
    owner = f"owner-{uuid.uuid4().hex}"
    with pytest.raises(SandboxSpecRejectedError, match=r"project_limit.*page"):
        await LiveSandbox.create(engine, spec, owner=owner, extra_labels=marks(run_labels))
    assert engines.api.containers(f"{labels.OWNER}={owner}") == []
    assert engines.api.volumes(f"{labels.OWNER}={owner}") == []


async def test_a_project_counts_as_memory_before_anything_is_made(
    make_sandbox: MakeSandbox, project: Path
) -> None:
    """RES-05."""
    with pytest.raises(SandboxSpecRejectedError, match="project_limit"):
        await make_sandbox(project=str(project), mem_limit=256 * MIB, project_limit=128 * MIB)


# -- the template -------------------------------------------------------------------------------


async def test_each_new_workspace_begins_as_a_copy_of_the_template(
    make_sandbox: MakeSandbox, tmp_path: Path, workspace: str
) -> None:
    """B10: before the first command, as the code's own, and only once."""
    folder = tmp_path / "template"
    fill(folder, "lib/a.py", ".hidden")
    ephemeral = await make_sandbox(template=str(folder))
    listed = await sh(ephemeral, "cd /workspace && find . | sort && stat -c %u lib")
    assert listed.out.split() == [".", "./.hidden", "./lib", "./lib/a.py", "10001"]
    settings = {"durability": "persistent", "workspace": workspace, "template": str(folder)}
    first = await make_sandbox(**settings)
    assert (await sh(first, "cd /workspace && find . | sort")).out.split() == [
        *(".", "./.hidden", "./lib", "./lib/a.py"),
    ]
    assert (await sh(first, "echo mine > /workspace/lib/a.py; rm /workspace/.hidden")).code == 0
    await first.close()
    second = await make_sandbox(**settings)
    assert (await sh(second, "cd /workspace && find . | sort; cat lib/a.py")).out.split() == [
        *(".", "./lib", "./lib/a.py", "mine"),
    ]


async def test_a_workspace_is_shared_only_when_it_has_been_filled(
    make_sandbox: MakeSandbox, tmp_path: Path, workspace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B7, B10: the one who is second does not see half a template."""
    folder = tmp_path / "template"
    fill(folder, *(f"f{n}" for n in range(50)))
    settings = {"durability": "persistent", "workspace": workspace, "template": str(folder)}

    async def count() -> str:
        sandbox = await make_sandbox(**settings)
        return (await sh(sandbox, "ls -A /workspace | wc -l")).out.strip()

    assert set(await asyncio.gather(*(count() for _ in range(4)))) == {"50"}


async def test_a_filling_that_was_cut_off_is_done_again(
    make_sandbox: MakeSandbox,
    engine: Engine,
    tmp_path: Path,
    workspace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B10: and until then nobody gets the sandbox."""
    folder = tmp_path / "template"
    fill(folder, "a", "b")
    settings = {"durability": "persistent", "workspace": workspace, "template": str(folder)}
    put = Files.put

    async def cut(self: Files, source: object, target: object = "", **options: object) -> None:
        await put(self, folder / "a", "/workspace/a")
        raise SandboxError("the line was cut")

    with monkeypatch.context() as patch:
        patch.setattr(Files, "put", cut)
        with pytest.raises(SandboxError, match="line was cut"):
            await make_sandbox(**settings)
    sandbox = await make_sandbox(**settings)
    assert (await sh(sandbox, "ls -A /workspace")).out == "a\nb\n"


async def test_whoever_waits_fills_the_workspace_when_the_first_one_dies(
    make_sandbox: MakeSandbox,
    engine: Engine,
    tmp_path: Path,
    workspace: str,
    python_image: str,
    run_labels: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B7, B10: it is removed with the one who began, and made anew by the one who waits."""
    folder = tmp_path / "template"
    fill(folder, "a", "b")
    spec = SandboxSpec(
        image=python_image,
        durability="persistent",
        workspace=workspace,
        template=str(folder),
        lease_ttl=3,
    )
    put, calls = Files.put, 0
    begun = asyncio.Event()

    async def slow(self: Files, *args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            begun.set()
            await asyncio.sleep(3600)
        return await put(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Files, "put", slow)
    first = asyncio.ensure_future(
        LiveSandbox.create(engine, spec, owner="tester", extra_labels=marks(run_labels))
    )
    await asyncio.wait_for(begun.wait(), 30)
    second = asyncio.ensure_future(
        make_sandbox(
            durability="persistent", workspace=workspace, template=str(folder), lease_ttl=3
        )
    )
    done, _ = await asyncio.wait({second}, timeout=2)
    assert not done
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    sandbox = await asyncio.wait_for(second, 60)
    assert (await sh(sandbox, "ls -A /workspace")).out == "a\nb\n"
