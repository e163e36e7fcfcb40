"""The magics for files: get, put, list, and the artifacts of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class
from sandbox_magics import options
from sandbox_magics.declaration import magic
from sandbox_magics.flags import Parsed
from sandbox_magics.magic import SandboxMagics
from sandbox_magics.worker import Worker

if TYPE_CHECKING:
    from sandbox_magics.artifacts import Artifacts
    from sandbox_magics.transfer import Listing

__all__ = ["FileMagics"]


@magics_class
class FileMagics(Magics):
    """Files in and out of the notebook's sandbox.

    Parameters
    ----------
    shell
        The shell.
    main
        Whose runs and session these are.
    """

    def __init__(self, shell: Any, main: SandboxMagics) -> None:
        super().__init__(shell=shell, parent=shell)
        self._main = main

    @magic("line", options.GET)
    def sandbox_get(self, line: str) -> None:
        """Get a file or folder out of the notebook's sandbox, into the notebook's folder."""
        from sandbox_magics.transfer import get

        self._carry(get, options.GET.parse(line))

    @magic("line", options.PUT)
    def sandbox_put(self, line: str) -> None:
        """Put a file or folder of this machine into the notebook's sandbox."""
        from sandbox_magics.transfer import put

        self._carry(put, options.PUT.parse(line))

    def _carry(self, work: Any, parsed: Parsed) -> None:
        if not 1 <= len(parsed.rest) <= 2:
            raise UsageError("name what, and where if it shall have another name or place")
        print(Worker.current().run(work(self._main.session, parsed.rest, parsed["force"])))

    @magic("line", options.LIST)
    def sandbox_ls(self, line: str) -> Listing:
        """List a folder of the notebook's sandbox, by default /workspace."""
        from sandbox_magics.transfer import listed

        parsed = options.LIST.parse(line)
        if len(parsed.rest) > 1:
            raise UsageError("%sandbox_ls takes one path")
        path = parsed.rest[0] if parsed.rest else ""
        return Worker.current().run(listed(self._main.session, path, parsed["recursive"]))

    @magic("line", options.ARTIFACTS)
    def sandbox_artifacts(self, line: str) -> Artifacts:
        """Return the artifacts of a run, by default of the newest one that left any."""
        from sandbox_magics.artifacts import Artifacts

        parsed = options.ARTIFACTS.parse(line)
        if parsed.rest:
            result = self._main.one(parsed, "artifacts").result
        else:
            ended = (run.result for run in self._main.runs if run.result is not None)
            result = next((each for each in ended if each.artifacts), None)
        return Artifacts() if result is None or result.artifacts is None else result.artifacts
