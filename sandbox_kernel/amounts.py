"""Amounts of memory as people write them: `parse_memory` reads, `memory_text` shows."""

from __future__ import annotations

import math
import re
from typing import Final

from sandbox_kernel.errors import SandboxSpecRejectedError

__all__ = ["memory_text", "parse_memory"]

_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}

_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE | re.ASCII)


def parse_memory(value: str | int, setting: str = "mem_limit") -> int:
    """Read an amount of memory as DockerSpawner does: bytes, or a number with K, M, G or T.

    Parameters
    ----------
    value
        For example ``"2G"``, ``"512M"`` or ``1073741824``. Units are powers of 1024.
    setting
        What an error calls it.

    Raises
    ------
    SandboxSpecRejectedError
        It is not an amount of memory.

    Examples
    --------
    >>> parse_memory("1.5G")
    1610612736
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _MEMORY.fullmatch(value) if isinstance(value, str) and len(value) < 64 else None
    if match is None:
        raise SandboxSpecRejectedError(
            setting, value, "this is not an amount of memory", "Write bytes, or e.g. '2G'."
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_text(size: float) -> str:
    """Write an amount of memory with the largest unit that keeps it short.

    Examples
    --------
    >>> memory_text(1610612736)
    '1.5 GiB'
    """
    if size == math.inf:
        return "no limit"
    for unit in ("T", "G", "M", "K"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g} {unit}iB"
    return f"{size:g} bytes"
