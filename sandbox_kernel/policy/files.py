"""Finding policy files, and telling how far each can be trusted.

A policy that somebody else can write is none, so a file that a third person could change, or
could put another one in the place of, is refused and nothing starts. One that only root can
change is *binding*. One that belongs to the person who is restricted is self-restraint: it is
obeyed, but that person can take it away again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.document import PolicyDocument, parse_policy
from sandbox_kernel.policy.judgement import Policy

__all__ = ["POLICY_NAME", "load_policy", "read_regular_file"]

POLICY_NAME: Final = "jupyter_sandbox_policy.json"

LARGEST_FILE: Final = 1 << 20
_MOST_LINKS: Final = 40


def load_policy(folders: Iterable[Path], uid: int | None = None) -> Policy:
    """Read every policy file that is there.

    Parameters
    ----------
    folders
        Where to look; each may hold one file.
    uid
        Who is restricted; by default the effective user of this process.

    Raises
    ------
    SandboxSpecRejectedError
        A file is there and cannot be read, understood or trusted, so that nothing may start.
    """
    if uid is None:
        uid = os.geteuid() if hasattr(os, "geteuid") else 0
    documents: list[PolicyDocument] = []
    for path in dict.fromkeys(folder / POLICY_NAME for folder in folders):
        document = _load(path, uid)
        if document is not None:
            documents.append(document)
    return Policy(tuple(documents))


def _load(path: Path, uid: int) -> PolicyDocument | None:
    try:
        # A link that leads nowhere is there all the same: what it led to may be missing by
        # mistake.
        if not _is_there(path):
            return None
        binding = _trust(path, uid)
        content = read_regular_file(path)
    except OSError as error:
        raise SandboxSpecRejectedError(
            str(path),
            None,
            f"the policy cannot be read ({error.strerror or error})",
            "Make the file and its folders readable for everyone.",
        ) from error
    return parse_policy(content, str(path), binding=binding)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_regular_file(path: Path) -> bytes:
    """Read a file of settings; never waits for one that is no regular file.

    Raises
    ------
    OSError
        It cannot be read, is no regular file, or is larger than 1 MiB.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise OSError(errno.EFBIG, "it is larger than 1 MiB")
    return content


def _trust(path: Path, uid: int) -> bool:
    """Whether only root can change what a path leads to.

    Raises
    ------
    SandboxSpecRejectedError
        Somebody can who is neither root nor the user `uid`.
    """
    if os.name != "posix":
        return False
    binding = True
    for part, status in _way(path):
        if _is_read_only(part):
            continue
        link = stat.S_ISLNK(status.st_mode)
        # In a sticky folder nobody can touch what belongs to another.
        shielded = link or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
        if status.st_uid not in {0, uid}:
            _distrust(path, part, f"belongs to another user (uid {status.st_uid})", "chown root")
        if status.st_mode & stat.S_IWOTH and not shielded:
            _distrust(path, part, "can be written by everyone", "chmod o-w")
        by_group = bool(status.st_mode & stat.S_IWGRP and status.st_gid != 0 and not shielded)
        if by_group and (other := _another_member(status.st_gid, {0, uid, status.st_uid})):
            who = f"can be written by a group that {other} is in (gid {status.st_gid})"
            _distrust(path, part, who, "chmod g-w")
        if status.st_uid != 0 or by_group:
            binding = False
    return binding


def _another_member(gid: int, known: set[int]) -> str:
    """Return somebody who is in a group besides those users; empty where nobody is known to be."""
    import grp
    import pwd

    with contextlib.suppress(KeyError):
        for name in grp.getgrgid(gid).gr_mem:
            try:
                if pwd.getpwnam(name).pw_uid in known:
                    continue
            except KeyError:
                pass  # whoever that is
            return name
    return next(
        (u.pw_name for u in pwd.getpwall() if u.pw_gid == gid and u.pw_uid not in known), ""
    )


def _distrust(path: Path, part: Path, why: str, remedy: str) -> None:
    which = "the file" if part == path else str(part)
    raise SandboxSpecRejectedError(
        str(path), None, f"this policy cannot be trusted: {which} {why}", f"Run: {remedy} {part}"
    )


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every folder and link on the way to a file, and the file itself."""
    here = Path(path.anchor)
    yield here, here.lstat()
    ahead = list(reversed(path.parts[1:]))
    links = 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            here = here.parent
            continue
        step = here / part
        status = step.lstat()
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = step.readlink()
        if target.is_absolute():
            here = Path(target.anchor)
        ahead.extend(reversed([p for p in target.parts if p != target.anchor]))


def _is_read_only(path: Path) -> bool:
    """Whether nobody can write there whatever the mode says, as on a mounted ConfigMap."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False
