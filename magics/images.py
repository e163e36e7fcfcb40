"""``%sandbox_build``: the image of sandbox-kernel, or one from a Dockerfile of one's own.

The former is what ``jupyter sandbox build`` makes, which is called for it. A build is no sandbox:
the commands of a Dockerfile run as root in containers of the engine's own, and without a network
unless somebody allows it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sandbox_magics import view
from sandbox_magics.text import clean
from sandbox_magics.worker import Worker

if TYPE_CHECKING:
    from sandbox_kernel.sandbox.order import Order

__all__ = ["bundled", "checks", "own"]

_COMMAND: Final = [
    sys.executable, "-c", "from sandbox_kernel.app.main import main; main()",
]  # fmt: skip
_STATUS_TIME: Final = 60.0
_END_TIME: Final = 10.0


def bundled(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Build the image of sandbox-kernel and return the exit code.

    Parameters
    ----------
    words
        Options of ``jupyter sandbox build``.
    say
        Told each line.
    """
    with subprocess.Popen(  # noqa: S603 - our own command
        [*_COMMAND, "build", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(clean(line.rstrip("\n")))
            return process.wait()
        except BaseException:
            # Stop: closing its connection makes the engine stop too.
            process.terminate()
            process.wait(_END_TIME)
            raise


def own(
    order: Order,
    context: Path | bytes,
    options: Mapping[str, Any],
    say: Callable[[str], None],
) -> str:
    """Build an image from a Dockerfile, and return what came out in words.

    Parameters
    ----------
    order
        What policy and configuration came to.
    context
        The folder, or the Dockerfile itself.
    options
        Of `sandbox_kernel.sandbox.building.build`.
    say
        Told each line; it is called in another thread.
    """
    from sandbox_kernel.sandbox.building import build

    guard = threading.Lock()

    def hear(step: Any) -> None:
        with guard:
            for line in str(step.text).splitlines():
                if line.strip():
                    say(clean(line))

    made = Worker.current().run(build(order, context, progress=hear, **options))
    return f"built {view.one_line(order.spec.image)} ({made.id[:19]}, {view.memory(made.size)})"


def checks() -> list[dict[str, str]]:
    """Return what ``jupyter sandbox status`` finds: name, level, text and remedy of each check."""
    done = subprocess.run(  # noqa: S603 - our own command
        [*_COMMAND, "status", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_STATUS_TIME,
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace")[-500:]
        return [{"name": "status", "level": "problem", "text": said, "remedy": ""}]
    if "checks" in found:
        return list(found["checks"])
    text = str((found.get("error") or {}).get("text"))
    return [{"name": "status", "level": "problem", "text": text, "remedy": ""}]
