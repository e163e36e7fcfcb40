"""The magics for images and health: build, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class
from sandbox_magics import options
from sandbox_magics.declaration import magic
from sandbox_magics.flags import Parsed

if TYPE_CHECKING:
    from sandbox_magics.status import Status

__all__ = ["ImageMagics"]

_BUILD_TIME: Final = 3600.0


@magics_class
class ImageMagics(Magics):
    """Images to run in, and what else runs need."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell=shell, parent=shell)

    @magic("both", options.BUILD)
    def sandbox_build(self, line: str, cell: str | None = None) -> None:
        """Build an image: that of sandbox-kernel, or one from a folder or a cell of one's own."""
        parsed = options.BUILD.parse(line)
        if len(parsed.rest) > 1 or (parsed.rest and cell is not None):
            raise UsageError(f"one folder, or a cell: {options.BUILD.usage}")
        for_ours = [name for name in ("base_image", "pip", "apt") if parsed[name]]
        if cell is None and not parsed.rest:
            self._build_bundled(parsed)
        elif for_ours:
            raise UsageError(
                f"--{for_ours[0].replace('_', '-')} is for the image of sandbox-kernel"
            )
        else:
            self._build_own(parsed, line, cell)

    def _build_bundled(self, parsed: Parsed) -> None:
        from sandbox_magics.images import bundled

        if parsed["file"] or parsed["network"]:
            raise UsageError(
                "--file and --network are for a Dockerfile of your own: name its folder"
            )
        words = [f"--tag={parsed['tag']}"] if parsed["tag"] else []
        words += [f"--base-image={parsed['base_image']}"] if parsed["base_image"] else []
        words += [f"--pip={name}" for name in parsed["pip"]]
        words += [f"--apt={name}" for name in parsed["apt"]]
        words += [f"--{name}" for name in ("pull", "no-cache") if parsed[name.replace("-", "_")]]
        lines: list[str] = []
        code = bundled(words, lines.append if parsed["quiet"] else _say)
        if code != 0:
            from sandbox_kernel.errors import SandboxBuildError

            said = "\n".join(lines[-20:]) or "see above"
            raise SandboxBuildError(f"The image was not built: {said}")
        if lines:
            print(lines[-1])

    def _build_own(self, parsed: Parsed, line: str, cell: str | None) -> None:
        from sandbox_magics.consent import Question, obtain
        from sandbox_magics.images import own

        from sandbox_kernel.sandbox.building import settle_build

        if not parsed["tag"]:
            raise UsageError("name the image: -t TAG")
        name = parsed["file"] or "Dockerfile"
        context = cell.encode() if cell is not None else Path(parsed.rest[0]).resolve()
        order = settle_build(parsed["tag"], door="magics")
        if parsed["network"]:
            source = (
                f"%sandbox_build {line}".rstrip()
                if cell is None
                else (f"%%sandbox_build {line}".rstrip() + f"\n{cell}")
            )
            what = cell if cell is not None else f"docker build {parsed.rest[0]}"
            question = Question(
                source=source,
                command=what,
                image=parsed["tag"],
                timeout=_BUILD_TIME,
                # Of a folder the digest of the line tells nothing.
                fixed=cell is not None,
                network="the engine's own: all that its machine reaches",
            )
            obtain(self.shell, question)
        told = own(
            order,
            context,
            {
                "dockerfile": name,
                "network": parsed["network"],
                "pull": parsed["pull"],
                "no_cache": parsed["no_cache"],
            },
            (lambda text: None) if parsed["quiet"] else _say,
        )
        print(told)

    @magic("line", options.DOCTOR)
    def sandbox_doctor(self, line: str) -> Status:
        """Look at everything that a sandbox needs, and say what to do about each problem."""
        from sandbox_magics.images import checks
        from sandbox_magics.status import diagnosis

        options.DOCTOR.parse(line)
        return diagnosis(checks())


def _say(text: str) -> None:
    print(text, flush=True)
