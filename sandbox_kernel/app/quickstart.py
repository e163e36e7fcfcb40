"""``jupyter sandbox quickstart``: from an engine to a notebook that ran in a sandbox.

Everything that it does can be done with the other commands; here they come in one go, with
what happened told on the way. The notebook is the one in ``notebooks/quickstart.ipynb``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from traitlets import Bool, Unicode

from sandbox_kernel.app.build import DEFAULT_BASE, BuildRequest, build_python_image, find_built
from sandbox_kernel.app.command import ENGINE_ALIASES, ENGINE_FLAGS, SandboxCommand
from sandbox_kernel.app.display import BuildDisplay, plain
from sandbox_kernel.app.site import detect_site
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.engine.probe import probe
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError, SandboxStartError
from sandbox_kernel.kernel.kernelspec import (
    DEFAULT_DISPLAY_NAME,
    DEFAULT_NAME,
    KernelRequest,
    default_location,
    install_kernelspec,
)

NOTEBOOK = "quickstart.ipynb"
FACTS = "facts"
"""Tag of the cell whose output says where the code ran."""


_ALIASES: dict[Any, Any] = {
    **ENGINE_ALIASES,
    "base-image": (
        "QuickstartApp.base_image",
        f"Image to start from if one is built (default: {DEFAULT_BASE}).",
    ),
    "prefix": (
        "QuickstartApp.prefix",
        "Install the kernel below PREFIX/share/jupyter (default: as `jupyter sandbox install`).",
    ),
    "output": ("QuickstartApp.output", "File to write the executed notebook to."),
}

_FLAGS: dict[Any, Any] = {
    **{name: value for name, value in ENGINE_FLAGS.items() if name != "json"},
    "network-host": (
        {"QuickstartApp": {"network_host": True}},
        "Use the engine machine's own network for the build's downloads.",
    ),
    "rebuild": ({"QuickstartApp": {"rebuild": True}}, "Build the image even if it is there."),
}


_EXAMPLES = """\
jupyter sandbox quickstart
jupyter sandbox quickstart --output first.ipynb        # keep the notebook as it ran
jupyter sandbox quickstart --base-image sandbox-kernel/base:bookworm
"""


class QuickstartApp(SandboxCommand):
    """``jupyter sandbox quickstart``."""

    name = "jupyter-sandbox-quickstart"
    description = """Check the engine, build the image if it is missing or old, install the kernel
    for Jupyter, run a first notebook in a sandbox and show what it found out about itself. Can
    be run again at any time."""
    examples = _EXAMPLES

    aliases = _ALIASES
    flags = _FLAGS

    base_image = Unicode(DEFAULT_BASE, help="Image to start from. Since 0.1.").tag(config=True)
    output = Unicode("", help="File for the executed notebook. Since 0.1.").tag(config=True)
    prefix = Unicode("", help="Install the kernel below this folder. Since 0.1.").tag(config=True)
    network_host = Bool(False, help="Build with the network of the host. Since 0.1.").tag(
        config=True
    )
    rebuild = Bool(False, help="Build the image even if it is there. Since 0.1.").tag(config=True)

    def run(self) -> int:
        """Do it, step by step."""
        for needed in ("nbclient", "nbformat"):
            if find_spec(needed) is None:
                raise SandboxError(
                    f"{needed} is needed to run a notebook. Install it with: "
                    "pip install 'sandbox-kernel[lab]'"
                )
        # The kernel must find the same engine later, when the options are not there.
        config = {"image": DEFAULT_IMAGE, **self.engine_options()}
        endpoint = self.settle(config, door="kernel").endpoint()
        thread = EngineThread.current()
        report = thread.run(probe, endpoint)
        self._done(f"{report.product} {report.version} answers at {endpoint.url}")
        self._image(endpoint)
        location = {"prefix": self.prefix} if self.prefix else default_location()
        folder = install_kernelspec(KernelRequest(config=config), **location)
        self._done(f"the kernel {DEFAULT_DISPLAY_NAME!r} is installed in {folder}")
        self._notebook()
        return 0

    def _done(self, text: str) -> None:
        self.out.print("[green]✓[/]", end=" ")
        self.out.print(plain(text), markup=False)

    def _image(self, endpoint: Endpoint) -> None:
        network = "host" if self.network_host else ""
        request = BuildRequest(base_image=self.base_image, network=network)
        if not self.rebuild and find_built(endpoint, request) is not None:
            self._done(f"the image {DEFAULT_IMAGE} is there")
            return
        started = time.monotonic()
        with BuildDisplay(self.err, DEFAULT_IMAGE) as display:
            image = build_python_image(endpoint, request, detect_site(os.environ), display)
        seconds = time.monotonic() - started
        self._done(f"built {DEFAULT_IMAGE} ({image.size / 1e6:.0f} MB) in {seconds:.0f} s")

    def _notebook(self) -> None:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        from tornado.web import HTTPError

        text = files("sandbox_kernel.notebooks").joinpath(NOTEBOOK).read_text(encoding="utf-8")
        notebook = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="sandbox-quickstart-") as folder:
            client = NotebookClient(
                notebook,
                timeout=120,
                startup_timeout=60,
                kernel_name=DEFAULT_NAME,
                resources={"metadata": {"path": folder}},
            )
            with self._quiet():
                try:
                    client.execute()
                except CellExecutionError as error:
                    raise SandboxStartError(
                        f"The notebook did not run to its end:\n{plain(str(error))}"
                    ) from error
                except HTTPError as error:
                    # The one kind of error whose text a Jupyter server shows to people.
                    text = error.log_message or error.reason or str(error)
                    raise SandboxStartError(f"The kernel did not start: {plain(text)}") from error
                except RuntimeError as error:
                    raise SandboxStartError(
                        f"The kernel did not work: {plain(str(error))}"
                    ) from error
        cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        seconds = time.monotonic() - started
        self._done(f"ran {cells} cells of {NOTEBOOK} in a sandbox in {seconds:.1f} s:")
        self.out.print()
        for line in facts(notebook).splitlines():
            self.out.print(f"    {plain(line)}", markup=False)
        self.out.print()
        command = shlex.join([str(Path(sys.executable).with_name("jupyter")), "lab"])
        if self.output:
            target = Path(self.output).expanduser()
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, target)  # type: ignore[no-untyped-call]
            except OSError as error:
                raise SandboxError(f"{target} cannot be written: {error.strerror}") from error
            self._done(f"the notebook as it ran: {target}")
            command = f"{command} {shlex.quote(str(target))}"
        self.out.print(f"Open JupyterLab with:\n\n    {command}\n", markup=False)
        self.out.print(f"and choose {DEFAULT_DISPLAY_NAME!r} in its launcher.", markup=False)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Keep Jupyter's own log of a failure, traceback included, off the terminal."""
        level = int(self.log_level)  # type: ignore[call-overload]
        if level > logging.DEBUG:
            self.log_level = logging.CRITICAL
        try:
            yield
        finally:
            self.log_level = level


def facts(notebook: Any) -> str:
    """Return what the notebook's tagged cell printed about where it ran."""
    for cell in notebook.cells:
        if FACTS in cell.metadata.get("tags", ()):
            return "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return ""
