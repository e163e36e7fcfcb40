"""Folders of the caller's machine in a sandbox: the template and the project (B10, B11).

Both are copied, never mounted: nothing that a sandbox does reaches the folder. The template is
what a new workspace begins as, and is the code's from then on. The project lies in memory that
the control uid owns, so that the code can read it and change nothing; what its ignore files name,
and the folder of a version control system, stay on the caller's machine.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pathspec import GitIgnoreSpec, PathSpec

from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxError,
    SandboxSpecRejectedError,
    SandboxStartError,
)
from sandbox_kernel.process.files import Files, TransferLimits
from sandbox_kernel.process.files.failures import Asked
from sandbox_kernel.process.files.outgoing import Tree
from sandbox_kernel.process.files.workers import Workers
from sandbox_kernel.sandbox.container import CODE_USER, CONTROL_USER, PROJECT, WORKSPACE
from sandbox_kernel.sandbox.programs import workspace_program
from sandbox_kernel.sandbox.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.running import RunningSandbox

_DOCKER: Final = ".dockerignore"
_GIT: Final = ".gitignore"
_VERSION_CONTROL: Final = frozenset({".git", ".hg", ".svn"})
_CHECKPOINTS: Final = ".ipynb_checkpoints"
"""Where Jupyter keeps what notebooks were like before."""

_LARGEST: Final = 1024 * 1024
"""Bytes of an ignore file."""

_MOST_ENTRIES: Final = 50_000
_FRESH, _USED = 0, 1


class ProjectRules(PathSpec[Any]):
    """What of a project's folder stays outside.

    The ``.dockerignore`` of the folder counts, and each ``.gitignore`` for what is below it. A
    path that one of them excludes is excluded.

    Parameters
    ----------
    folder
        The project's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._docker = GitIgnoreSpec.from_lines(_anchored(_lines(folder / _DOCKER)))
        self._git: dict[str, GitIgnoreSpec] = {}
        self._folders: dict[str, bool] = {}
        # A folder that git ignores stays ignored with all that is in it; in a .dockerignore
        # something in it can be brought back.
        super().__init__(self._docker.patterns)

    def match_file(self, file: str | os.PathLike[str], separators: Any = None) -> bool:
        """Say whether a path, relative to the folder, stays outside; a slash ends a folder's."""
        path = os.fspath(file)
        parts = path.rstrip("/").split("/")
        if _VERSION_CONTROL.intersection(parts) or _CHECKPOINTS in parts:
            return True
        return self._docker.match_file(path) or self._git_ignores(path)

    def _git_ignores(self, path: str) -> bool:
        folder = path.rstrip("/").rpartition("/")[0]
        if folder:
            if folder not in self._folders:
                self._folders[folder] = self._git_ignores(folder + "/")
            if self._folders[folder]:
                return True
        parts = path.rstrip("/").split("/")
        for depth in range(len(parts)):
            above = "/".join(parts[:depth])
            if above not in self._git:
                lines = _lines(self._folder / above / _GIT)
                self._git[above] = GitIgnoreSpec.from_lines(lines)
            if self._git[above].match_file(path[len(above) + 1 :] if above else path):
                return True
        return False


def _lines(file: Path) -> list[str]:
    """Return the lines of an ignore file; none where there is no such file."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return []
    try:
        data = os.read(fd, _LARGEST) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
    text = data.decode("utf-8", "replace")
    return text.removeprefix("\ufeff").splitlines()


def _anchored(lines: Iterable[str]) -> Iterator[str]:
    """Translate a ``.dockerignore``: each of its patterns begins at the folder itself."""
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        back = "!" if text.startswith("!") else ""
        pattern = posixpath.normpath(text.removeprefix("!").strip()).lstrip("/")
        if pattern not in {"", "."}:
            yield f"{back}/{pattern}"


async def check_folders(spec: SandboxSpec) -> None:
    """Refuse, before anything is created, folders that cannot be copied.

    Raises
    ------
    SandboxSpecRejectedError
        One of them is no folder, is too large, or has a link that leads out.
    """
    with Workers() as workers:
        if spec.template is not None:
            rules = _rules(spec.template) if spec.template_ignore else None
            limits = _template_limits(spec)
            await workers.do(_look_through, "template", spec.template, limits, rules)
        if spec.project is not None:
            limits = _project_limits(spec)
            await workers.do(_look_through, "project", spec.project, limits, _rules(spec.project))


def _look_through(
    setting: str, folder: str, limits: TransferLimits, rules: PathSpec[Any] | None
) -> None:
    path = Path(folder)
    if not path.is_dir():
        _refuse(setting, folder, "there is no such folder on this machine", "Name a folder.")
    limit = "" if limits == TransferLimits() else f"{setting}_limit"
    asked = Asked(setting, folder, limits, setting, folder, limit)
    try:
        with asked.answered():
            Tree(path, limits, rules)
    except SandboxSpecRejectedError as error:
        if error.setting in {setting, limit}:
            raise
        # A link in it, which is named by its path below the folder.
        reason = f"{error.value}: {error.reason}"
        raise SandboxSpecRejectedError(setting, folder, reason, error.remedy) from error
    except (SandboxError, OSError) as error:
        _refuse(setting, folder, str(error), "Make it readable, or name another one.")


def _rules(folder: str) -> ProjectRules:
    return ProjectRules(Path(folder))


def _template_limits(spec: SandboxSpec) -> TransferLimits:
    if spec.template_limit is None:
        return TransferLimits()
    return TransferLimits(file_size=spec.template_limit, total_size=spec.template_limit)


def _project_limits(spec: SandboxSpec) -> TransferLimits:
    return TransferLimits(
        entries=_MOST_ENTRIES, file_size=spec.project_limit, total_size=spec.project_limit
    )


async def give_project(sandbox: RunningSandbox, folder: str) -> None:
    """Put the snapshot of a project into a sandbox in which no code has run yet.

    Parameters
    ----------
    sandbox
        The sandbox.
    folder
        The project's folder.

    Raises
    ------
    SandboxSpecRejectedError
        It does not fit, or has changed so that it cannot be copied.
    SandboxImageUnsuitableError
        The image has no python3.
    """
    spec = sandbox.spec
    files = Files(
        sandbox.engine, sandbox.id, user=CONTROL_USER, workspace=PROJECT, roots=(PROJECT,)
    )
    try:
        await files.put(folder, PROJECT, ignore=_rules(folder), limits=_project_limits(spec))
    except SandboxDiskFullError as error:
        reason = "the project's files take more room than that in memory, a page each at least"
        raise SandboxSpecRejectedError(
            "project_limit",
            spec.project_limit,
            reason,
            "Set it higher, or leave something out with a .dockerignore.",
        ) from error
    # What only its owner may read there, the control uid alone could read here.
    code, _ = await sandbox.run_quietly(["chmod", "-R", "a+rX", PROJECT], CONTROL_USER)
    if code != 0:
        raise SandboxStartError(f"The files in {PROJECT} could not be made readable")


async def give_template(sandbox: RunningSandbox, folder: str, *, is_new: bool) -> None:
    """Fill a new workspace before any code has run in the sandbox.

    A workspace is new when its volume was made for this sandbox, when it holds nothing, or when
    its filling was begun by somebody who did not come to the end.

    Parameters
    ----------
    sandbox
        The sandbox.
    folder
        The template.
    is_new
        Whether the volume was made for this sandbox.

    Raises
    ------
    SandboxDiskFullError
        There is no room.
    SandboxImageUnsuitableError
        The image has no python3.
    """
    how = "new" if is_new else "maybe"
    code, _ = await sandbox.run_quietly(workspace_program("begin", WORKSPACE, how), CODE_USER)
    if code == _USED:
        return
    if code != _FRESH:
        raise SandboxStartError(f"{WORKSPACE} could not be looked into to fill it")
    files = Files(sandbox.engine, sandbox.id, user=CODE_USER)
    try:
        await files.put(
            folder,
            WORKSPACE,
            ignore=_rules(folder) if sandbox.spec.template_ignore else None,
            limits=_template_limits(sandbox.spec),
        )
    except SandboxConflictError as error:
        raise SandboxStartError(
            f"The image has something in {WORKSPACE} where the template has something else"
        ) from error
    code, _ = await sandbox.run_quietly(workspace_program("filled", WORKSPACE), CODE_USER)
    if code != 0:
        raise SandboxStartError(f"{WORKSPACE} was filled, and that could not be noted")


def _refuse(setting: str, value: object, reason: str, remedy: str) -> NoReturn:
    raise SandboxSpecRejectedError(setting, value, reason, remedy)
