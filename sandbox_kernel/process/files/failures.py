"""Which error a caller gets for trouble with a file, on either side (F1, F2)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxDiskFullError,
    SandboxError,
    SandboxFileNotFoundError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.process.files import trouble as codes
from sandbox_kernel.process.files.result import SkipReason, TransferLimits, printable
from sandbox_kernel.process.files.trouble import TroubleError, trouble_of

_REASONS = {
    codes.IS_LINK: ("it is, or leads through, a symbolic link", "Name the place itself."),
    codes.NOT_REGULAR: ("it is a FIFO, a socket or a device", "Name a regular file."),
    codes.IS_FOLDER: ("it is a folder", "Name a file, or write a '/' at the end to go into it."),
    codes.NOT_FOLDER: ("it, or what it lies in, is not a folder", "Choose another place."),
    codes.DENIED: ("its permissions do not allow this", "Change them, or choose another place."),
    codes.TOO_DEEP: ("its folders are nested too deeply", "Carry a part of them, or an archive."),
    codes.BAD_NAME: ("such a name is not possible", "Rename it."),
    codes.NOT_EMPTY: ("it is not empty", "Remove what is in it, or use recursive=True."),
}
_SKIP_REASONS: dict[int, SkipReason] = {
    codes.IS_LINK: "link",
    codes.NOT_REGULAR: "not-regular",
    codes.BAD_NAME: "name",
    codes.DUPLICATE: "duplicate",
    codes.DENIED: "denied",
    codes.NOT_FOUND: "vanished",
    codes.NOT_FOLDER: "not-a-folder",
    codes.IS_FOLDER: "not-regular",
}


class InsideTroubleError(Exception):
    """Trouble with a file in the sandbox; its path is absolute, or below what was asked for."""

    def __init__(self, trouble: TroubleError) -> None:
        super().__init__(trouble)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller asked for, in the caller's words.

    Parameters
    ----------
    setting
        Which of the parameters names the place in the sandbox.
    path
        That place.
    limits
        What the transfer may come to.
    local_setting, local_path
        Setting and path of the place on this machine, where there is one.
    limit_setting
        The one parameter that stands for the limits, where it is one.
    """

    setting: str
    path: str
    limits: TransferLimits
    local_setting: str = ""
    local_path: str = ""
    limit_setting: str = ""

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Give whatever goes wrong with files inside as the error for the caller."""
        try:
            yield
        except InsideTroubleError as error:
            trouble = error.trouble
            path = printable(trouble.path)
            if not path.startswith("/"):
                path = f"{self.path}/{path}" if path else self.path
            raise self._error(trouble, self.setting, path, "in the sandbox") from error
        except TroubleError as trouble:
            raise self._local(trouble) from trouble
        except OSError as error:
            if isinstance(error, SandboxError):
                raise
            raise self._local(trouble_of(error, "")) from error

    def _local(self, trouble: TroubleError) -> SandboxError:
        path = self.local_path
        if trouble.path and trouble.path != path:
            path = os.path.join(path, printable(trouble.path))  # noqa: PTH118 # text for people
        return self._error(trouble, self.local_setting, path, "on this machine")

    def _error(self, trouble: TroubleError, setting: str, path: str, where: str) -> SandboxError:
        code = trouble.code
        if code in _REASONS:
            reason, remedy = _REASONS[code]
            return SandboxSpecRejectedError(setting, path, f"{where}, {reason}", remedy)
        if code == codes.NOT_FOUND:
            if where == "in the sandbox":
                return SandboxFileNotFoundError(f"There is no {path} {where}")
            return SandboxSpecRejectedError(
                setting, path, f"there is no such file or folder {where}", "Correct the path."
            )
        if code == codes.EXISTS:
            return SandboxConflictError(
                f"There is a {path} {where} already. Remove it, or use overwrite=True"
            )
        if code == codes.DISK_FULL:
            return SandboxDiskFullError(f"There is no space left {where} for {path}")
        if trouble.number == errno.EFBIG:
            return SandboxSpecRejectedError(
                setting, path, f"{where}, no file can be so large", "Split it."
            )
        if code in (codes.TOO_LARGE, codes.TOO_MUCH, codes.TOO_MANY):
            return self._over_limit(code, path)
        detail = os.strerror(trouble.number) if trouble.number else "unknown trouble"
        return SandboxError(f"{path} {where} cannot be used: {detail}")

    def _over_limit(self, code: int, path: str) -> SandboxSpecRejectedError:
        name, reason = {
            codes.TOO_LARGE: ("file_size", f"{path} is larger"),
            codes.TOO_MUCH: ("total_size", f"the files in {path} come to more bytes"),
            codes.TOO_MANY: ("entries", f"there is more than that in {path}"),
        }[code]
        value = getattr(self.limits, name)
        return SandboxSpecRejectedError(
            self.limit_setting or f"limits.{name}", value, reason, "Raise the limit, or carry less."
        )


def skip_reason(code: int) -> SkipReason:
    """Return why something was left out."""
    return _SKIP_REASONS.get(code, "other")
