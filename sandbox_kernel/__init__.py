"""sandbox-kernel: Jupyter kernels and notebook commands in hardened containers.

Importing this package loads no engine and no Jupyter code, so that listing kernelspecs and
loading the magics stay cheap; the public names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "BlockingFiles",
    "BlockingProcess",
    "BlockingSandbox",
    "BlockingWorkspaces",
    "Chunk",
    "CommandError",
    "CommandFailedError",
    "CommandGoneError",
    "CommandOutputError",
    "CommandStartError",
    "CommandTimeoutError",
    "CommandUnknownError",
    "EndReason",
    "EngineSettings",
    "Exit",
    "FileEntry",
    "Limits",
    "RunResult",
    "Sandbox",
    "SandboxAttestationError",
    "SandboxBuildError",
    "SandboxConflictError",
    "SandboxDiskFullError",
    "SandboxEngineError",
    "SandboxEngineTimeoutError",
    "SandboxError",
    "SandboxExecTimeoutError",
    "SandboxFileNotFoundError",
    "SandboxFiles",
    "SandboxGoneError",
    "SandboxImageMissingError",
    "SandboxImageUnsuitableError",
    "SandboxInfo",
    "SandboxPausedError",
    "SandboxProcess",
    "SandboxProtocolError",
    "SandboxRunError",
    "SandboxSpec",
    "SandboxSpecRejectedError",
    "SandboxStartError",
    "SandboxUnavailableError",
    "SandboxUnknownOutcomeError",
    "SandboxWorkspaces",
    "StopReport",
    "Transfer",
    "TransferLimits",
    "WorkspaceInfo",
    "WorkspaceSize",
    "connect_sandbox",
    "find_sandboxes",
    "open_sandbox",
]

if TYPE_CHECKING:
    from sandbox_kernel.config import EngineSettings
    from sandbox_kernel.errors import (
        SandboxAttestationError,
        SandboxBuildError,
        SandboxConflictError,
        SandboxDiskFullError,
        SandboxEngineError,
        SandboxEngineTimeoutError,
        SandboxError,
        SandboxExecTimeoutError,
        SandboxFileNotFoundError,
        SandboxGoneError,
        SandboxImageMissingError,
        SandboxImageUnsuitableError,
        SandboxPausedError,
        SandboxProtocolError,
        SandboxRunError,
        SandboxSpecRejectedError,
        SandboxStartError,
        SandboxUnavailableError,
        SandboxUnknownOutcomeError,
    )
    from sandbox_kernel.process.files import FileEntry, Transfer, TransferLimits
    from sandbox_kernel.process.result import (
        Chunk,
        CommandError,
        CommandGoneError,
        CommandOutputError,
        CommandStartError,
        CommandTimeoutError,
        CommandUnknownError,
        Exit,
        RunResult,
    )
    from sandbox_kernel.process.stop import StopReport
    from sandbox_kernel.sandbox.blocking import (
        BlockingFiles,
        BlockingProcess,
        BlockingSandbox,
        BlockingWorkspaces,
        connect_sandbox,
        find_sandboxes,
        open_sandbox,
    )
    from sandbox_kernel.sandbox.facade import Sandbox
    from sandbox_kernel.sandbox.failure import CommandFailedError
    from sandbox_kernel.sandbox.files import SandboxFiles
    from sandbox_kernel.sandbox.found import SandboxInfo
    from sandbox_kernel.sandbox.live import EndReason
    from sandbox_kernel.sandbox.program import SandboxProcess
    from sandbox_kernel.sandbox.spec import Limits, SandboxSpec
    from sandbox_kernel.sandbox.workspace_access import SandboxWorkspaces
    from sandbox_kernel.sandbox.workspaces import WorkspaceInfo, WorkspaceSize

# Where the names are; those that are not here are errors.
_MODULES = {
    "BlockingFiles": "sandbox.blocking",
    "BlockingProcess": "sandbox.blocking",
    "BlockingSandbox": "sandbox.blocking",
    "BlockingWorkspaces": "sandbox.blocking",
    "Chunk": "process.result",
    "CommandError": "process.result",
    "CommandFailedError": "sandbox.failure",
    "CommandGoneError": "process.result",
    "CommandOutputError": "process.result",
    "CommandStartError": "process.result",
    "CommandTimeoutError": "process.result",
    "CommandUnknownError": "process.result",
    "EndReason": "sandbox.live",
    "EngineSettings": "config",
    "Exit": "process.result",
    "FileEntry": "process.files",
    "Limits": "sandbox.spec",
    "RunResult": "process.result",
    "Sandbox": "sandbox.facade",
    "SandboxFiles": "sandbox.files",
    "SandboxInfo": "sandbox.found",
    "SandboxProcess": "sandbox.program",
    "SandboxSpec": "sandbox.spec",
    "SandboxWorkspaces": "sandbox.workspace_access",
    "StopReport": "process.stop",
    "Transfer": "process.files",
    "TransferLimits": "process.files",
    "WorkspaceInfo": "sandbox.workspaces",
    "WorkspaceSize": "sandbox.workspaces",
    "connect_sandbox": "sandbox.blocking",
    "find_sandboxes": "sandbox.blocking",
    "open_sandbox": "sandbox.blocking",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
