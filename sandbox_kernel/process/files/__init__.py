"""Files in and out of a running sandbox (F1, F2, F3; architecture decision 10).

`Files` is what callers use. The host's side is `exchange` (one exec), `incoming` (judging what
comes), `landing` (where it goes) and `outgoing` (what is sent); `courier` is the program in
the sandbox, and `wire`, `trouble`, `rules` and `folder` are sent along with it.
"""

from sandbox_kernel.process.files.files import Files
from sandbox_kernel.process.files.result import (
    FileEntry,
    Kind,
    Progress,
    Skipped,
    SkipReason,
    Transfer,
    TransferLimits,
    printable,
)

__all__ = [
    "FileEntry",
    "Files",
    "Kind",
    "Progress",
    "SkipReason",
    "Skipped",
    "Transfer",
    "TransferLimits",
    "printable",
]
