"""What a wrapper's last reports mean: the code that is believed and the reason that is given.

Pure. An exit code is believed when two agree on it: the wrapper's report, which travels among
the command's own output, and the engine's record of how the wrapper itself ended.

What that is worth: the wrapper and its command have the same uid, since a container without
capabilities can change none, and so a command can read the wrapper's memory, the nonce included,
write its pipes, stop it and kill it. What it gains is a say in how *its own* run, or another one
of the same user in the same sandbox, is told: an exit code and an end that did not happen, or an
unknown outcome. It could have exited with that code anyway, and left processes behind by
detaching them. Numbers from a sandbox are only shown, and never name anything on the host; a
stop, which uses the reported pids, runs as the same uid in the same sandbox, where the command
could have sent these signals itself. Of the host nothing is within reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sandbox_kernel.process.result import Reason
from sandbox_kernel.process.stop import Identity, Kind

__all__ = ["Evidence", "agree", "parse_evidence", "parse_identity", "verdict"]

KILLED: Final = 137
INTERRUPTED: Final = 130
CUT: Final = 126
"""What an engine records of a wrapper that still ran when its stream was lost."""

_LARGEST: Final = 2**63
_UNITS: Final = {"us": 1e-6, "ns": 1e-9}
_LONGEST_PLACE: Final = 100


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the kernel counted in the sandbox while a command ran.

    Parameters
    ----------
    oom_kills, refused_forks
        Processes killed for lack of memory, and forks refused at the limit of processes; `None`
        where the kernel does not tell.
    peak_memory
        In bytes, of the whole sandbox since it was made.
    full
        A place that had no room left after the command had failed, or "".
    left
        Whether something lay in ``/output`` at its end.
    cpu_seconds
        Processor time of the whole sandbox meanwhile; `None` where the kernel does not tell.
    """

    oom_kills: int | None = None
    refused_forks: int | None = None
    peak_memory: int | None = None
    full: str = ""
    left: bool = False
    cpu_seconds: float | None = None

    def with_cpu(self, words: Sequence[str]) -> Evidence:
        """Return the same, with what the report "cpu" tells; unchanged for what is none."""
        if len(words) != 3 or words[0] not in _UNITS:
            return self
        before, after = _number(words[1]), _number(words[2])
        if before is None or after is None or after < before:
            return self
        return replace(self, cpu_seconds=(after - before) * _UNITS[words[0]])

    def with_left(self) -> Evidence:
        """Return the same, with something in ``/output``."""
        return replace(self, left=True)

    def with_full(self, place: str) -> Evidence:
        """Return the same, with the first of the full places."""
        return self if self.full else replace(self, full=place[:_LONGEST_PLACE])


def parse_identity(
    kind: Kind, files: tuple[str, str], marker: str, words: Sequence[str]
) -> Identity | None:
    """Read the report "ready"; `None` for what is not one."""
    numbers = [_number(word) for word in words]
    if len(numbers) != 6 or None in numbers:
        return None
    root, root_started, session, waiter, pid, pid_started = (n or 0 for n in numbers)
    if min(root, session, waiter, pid) < 1:
        return None
    return Identity(
        kind, root, root_started, session, waiter, pid, pid_started, *files, marker=marker
    )


def parse_evidence(words: Sequence[str]) -> tuple[int | None, Evidence]:
    """Read the report "exit": the command's code, `None` for what is none, and the counts."""
    numbers = [_number(word) for word in words]
    code = numbers[0] if numbers else None
    if code is None or not 0 <= code <= 255 or len(numbers) != 6:
        return None, Evidence()
    _, killed, killed_after, refused, refused_after, peak = numbers
    return code, Evidence(_grown(killed, killed_after), _grown(refused, refused_after), peak)


def agree(reported: int | None, recorded: int | None) -> bool:
    """Whether the wrapper's report and the engine's record tell of the same end."""
    return reported is not None and reported == recorded


def verdict(
    code: int | None,
    evidence: Evidence,
    *,
    killed: bool,
    interrupted: bool,
    out_of_memory: bool,
) -> tuple[Reason, str]:
    """Return why a command ended that nothing else has ended, and what shows it, in words.

    Parameters
    ----------
    code
        Its exit code, `None` when that is not known.
    evidence
        What was counted.
    killed, interrupted
        Whether we killed it while it ran, or sent it an interrupt.
    out_of_memory
        Whether the engine has reported lack of memory in the sandbox while it ran.
    """
    if killed and code in (None, KILLED):
        return "killed", ""
    if interrupted and code == INTERRUPTED:
        return "interrupted", ""
    if code is None:
        return ("out-of-memory", _ENGINE_SAYS) if out_of_memory else ("unknown", "")
    if code == 0:
        return "finished", ""
    if evidence.oom_kills:
        times = _times(evidence.oom_kills, "process was", "processes were")
        return "out-of-memory", f"{times} killed for lack of memory in the sandbox"
    if evidence.oom_kills is None and out_of_memory and code == KILLED:
        return "out-of-memory", _ENGINE_SAYS
    if evidence.refused_forks:
        times = _times(evidence.refused_forks, "process", "processes")
        return "pids-limit", f"{times} could not be started: the sandbox's limit was reached"
    if evidence.full:
        return "disk-full", f"no room is left in {evidence.full}"
    return "finished", ""


_ENGINE_SAYS: Final = "the engine reported that the sandbox had no memory left"


def _times(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(after - before, 0)


def _number(word: str) -> int | None:
    if not word.isascii() or not word.isdecimal() or len(word) > 19:
        return None
    value = int(word)
    return value if value < _LARGEST else None
