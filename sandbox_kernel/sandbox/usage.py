"""What a sandbox uses, read out of the engine's own measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Usage", "usage_of"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox uses at a moment.

    Parameters
    ----------
    memory
        Bytes, without what the kernel only keeps of files that it could read again.
    cpu_seconds
        Processor time since the sandbox was made.
    pids
        Processes and threads, the sandbox's own two or three included.
    """

    memory: int
    cpu_seconds: float
    pids: int


def usage_of(stats: Mapping[str, Any]) -> Usage:
    """Read the engine's answer; what it leaves out counts as nothing."""
    memory = stats.get("memory_stats") or {}
    details = memory.get("stats") or {}
    # By cgroup v1 and v2; the first is of the whole tree.
    cached = details.get("total_inactive_file", details.get("inactive_file", 0))
    usage = int(memory.get("usage") or 0)
    cpu = (stats.get("cpu_stats") or {}).get("cpu_usage") or {}
    return Usage(
        memory=max(usage - int(cached or 0), 0),
        cpu_seconds=int(cpu.get("total_usage") or 0) / 1e9,
        pids=int((stats.get("pids_stats") or {}).get("current") or 0),
    )
