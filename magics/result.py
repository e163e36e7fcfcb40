"""`SandboxResult`: what a run gave, for programs and for people.

A return code is `None` when it is not known; it is never invented. Texts and HTML for people are
made in `view`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from sandbox_magics import view
from sandbox_magics.capture import STDERR, STDOUT, Record

if TYPE_CHECKING:
    from IPython.utils.text import SList
    from sandbox_magics.artifacts import Artifacts
    from sandbox_magics.consent import Consent

__all__ = ["Reason", "SandboxResult"]

Reason = Literal[
    "finished",
    "timeout",
    "idle-timeout",
    "interrupted",
    "killed",
    "out-of-memory",
    "pids-limit",
    "disk-full",
    "output-limit",
    "engine-lost",
    "start-failed",
    "unknown",
]
"""Why a run ended; a program that ends by itself has "finished", whatever its code."""

_NAMES: Final = {STDOUT: "stdout", STDERR: "stderr"}


@dataclass(frozen=True, eq=False)
class SandboxResult:
    r"""What a run in a sandbox gave.

    It is true when the run succeeded, and iterating over it gives the lines of its stdout.

    Parameters
    ----------
    run_id
        As the status shows it, for example ``r12``.
    name
        What the run is called.
    argv
        What was run.
    returncode
        Of the program; 128 plus the signal when one ended it; `None` when it is not known.
    reason
        Why it ended.
    record
        What it wrote.
    started
        When it was asked for.
    duration
        Seconds until its end.
    image, image_digest
        What it ran in.
    network
        The tier of its network: ``none``, ``internal`` or ``egress``.
    peak_memory
        Most bytes that its whole sandbox has used at once; `None` where the engine does not tell.
    cpu_seconds
        Processor time of its sandbox during the run; `None` where the engine does not tell.
    detail
        For people: more about the reason, for example the limit that was hit.
    survivors
        Whether, after it was stopped, something of it may still run.
    consent
        Who allowed its network, when, and what exactly; `None` without a network.
    artifacts
        The files that it left in ``/output``.

    Examples
    --------
    >>> r = %sandbox_run -- printf 'a\nb\n'
    >>> r.ok, r.returncode, list(r)
    (True, 0, ['a', 'b'])
    """

    run_id: str
    name: str
    argv: tuple[str, ...] = field(repr=False)
    returncode: int | None
    reason: Reason
    record: Record = field(repr=False)
    started: datetime
    duration: float
    image: str = ""
    image_digest: str = ""
    network: str = "none"
    peak_memory: int | None = None
    cpu_seconds: float | None = None
    detail: str = ""
    survivors: bool = False
    consent: Consent | None = field(default=None, repr=False)
    artifacts: Artifacts | None = field(default=None, repr=False)

    # -- how it ended -------------------------------------------------------------------------

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself with code 0."""
        return self.reason == "finished" and self.returncode == 0

    def __bool__(self) -> bool:
        return self.ok

    # -- output -------------------------------------------------------------------------------

    @cached_property
    def stdout_bytes(self) -> bytes:
        """The captured stdout; where it was cut, a line says so."""
        return self.record.bytes_of(STDOUT)

    @cached_property
    def stderr_bytes(self) -> bytes:
        """The captured stderr; where it was cut, a line says so."""
        return self.record.bytes_of(STDERR)

    @cached_property
    def stdout(self) -> str:
        """The captured stdout as text."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @cached_property
    def stderr(self) -> str:
        """The captured stderr as text."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @cached_property
    def output(self) -> str:
        """Both, in the order in which they came."""
        return self.record.interleaved().decode("utf-8", "replace")

    @property
    def totals(self) -> Mapping[str, int]:
        """How many bytes the program wrote to each stream."""
        return {name: self.record.total(stream) for stream, name in _NAMES.items()}

    @property
    def truncated(self) -> Mapping[str, int]:
        """How many bytes of each stream were not kept; empty when all of it was."""
        cut = {name: self.record.cut(stream) for stream, name in _NAMES.items()}
        return {name: count for name, count in cut.items() if count}

    # -- as lines, like what ``!command`` gives -------------------------------------------------

    @cached_property
    def _lines(self) -> SList:
        from IPython.utils.text import SList

        return SList(self.stdout.splitlines())

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    @property
    def l(self) -> Sequence[str]:  # noqa: E743 # the name that IPython gave it
        """The lines of stdout."""
        return list(self._lines)

    @property
    def n(self) -> str:
        """The lines of stdout, with line ends between them."""
        return "\n".join(self._lines)

    @property
    def s(self) -> str:
        """The lines of stdout, with blanks between them."""
        return " ".join(self._lines)

    def grep(self, pattern: Any, prune: bool = False, field: int | None = None) -> Any:
        """Return the lines that match a regular expression; see `IPython.utils.text.SList`."""
        return self._lines.grep(pattern, prune, field)

    def fields(self, *fields: Any) -> Any:
        """Return columns of the lines; see `IPython.utils.text.SList`."""
        return self._lines.fields(*fields)

    # -- for people ---------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<SandboxResult {self.run_id} {view.footer_text(self)}>"

    def _repr_html_(self) -> str:
        return view.result_html(self)
