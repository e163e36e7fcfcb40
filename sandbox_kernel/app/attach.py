"""``jupyter sandbox attach``: a console on a kernel that runs already (K6).

Where a server or a notebook serves the kernel, the console is one more client of it. Where that
one has gone and the kernel outlived it, this command serves the kernel meanwhile.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.utils import run_sync

from sandbox_kernel.app.sandboxes import SandboxesCommand
from sandbox_kernel.errors import (
    SandboxConflictError,
    SandboxGoneError,
    SandboxSpecRejectedError,
)
from sandbox_kernel.kernel.kernelspec import PROVISIONER
from sandbox_kernel.kernel.record import KernelRecord, records

_CONSOLE = "jupyter_console"

_EXAMPLES = """\
jupyter sandbox attach                 # the only kernel that runs
jupyter sandbox attach 3f2a
"""


class AttachApp(SandboxesCommand):
    """``jupyter sandbox attach``."""

    name = "jupyter-sandbox-attach"
    description = """Open a console on a running kernel of yours, one whose Jupyter server has gone
    included, if it was made to outlive it (resumable). SANDBOX is the beginning of the sandbox's
    id, its name or the key of its workspace; it can be left out where one kernel runs. Ctrl-D
    and exit(True) leave the kernel running, exit ends it."""
    examples = _EXAMPLES
    arguments = "[SANDBOX]"

    def take(self, words: list[str]) -> None:
        """Take the sandbox."""
        if len(words) > 1:
            self._usage("takes one sandbox (see --help)")
        self._which = words[0] if words else None

    def run(self) -> int:
        """Open the console and wait for its end."""
        if importlib.util.find_spec(_CONSOLE) is None:
            raise SandboxSpecRejectedError(
                "attach",
                None,
                "the console of Jupyter is not installed in this environment",
                "Install it: pip install jupyter-console.",
            )
        record, is_served = self._chosen()
        if is_served:
            return _console(record.connection_file)
        self._serve(record)
        if not record.outlives:
            self.err.print("The kernel ends with this console: its sandbox is not resumable.")
        return _console(record.connection_file)

    def _chosen(self) -> tuple[KernelRecord, bool]:
        """Return the kernel that is meant, and whether somebody serves it."""
        running = {info.id: info for info in self.sandboxes() if info.kernel}
        known = [(r, served) for r, served in records() if r.sandbox in running]
        if self._which is None:
            if len(known) == 1:
                return known[0]
            if known:
                some = ", ".join(record.sandbox[:12] for record, _ in known)
                raise SandboxConflictError(f"Several kernels run: {some}. Name one of them")
            raise SandboxGoneError(
                "No kernel of yours runs in a sandbox that was started with this folder for "
                "runtime files (jupyter --runtime-dir)"
            )
        info = self.find(self._which)
        for record, is_served in known:
            if record.sandbox == info.id:
                return record, is_served
        if not info.kernel:
            raise SandboxConflictError(
                f"No kernel runs in the sandbox {info.short_id}. For other programs there is "
                "jupyter sandbox exec"
            )
        raise SandboxConflictError(
            f"The key of the kernel in the sandbox {info.short_id} is not on this machine, or not "
            "yours to read: it is kept by the process that started it, in Jupyter's folder for "
            "runtime files (jupyter --runtime-dir). Attach there"
        )

    def _serve(self, record: KernelRecord) -> None:
        """Serve a kernel whose process has gone, until this one ends."""
        manager = KernelManager(kernel_id=record.kernel_id, kernel_name=record.kernel_name)
        try:
            spec = manager.kernel_spec
        except NoSuchKernel as error:
            raise SandboxConflictError(
                f"The kernelspec {record.kernel_name!r} of the kernel is not installed any more"
            ) from error
        stanza = (spec.metadata or {}).get("kernel_provisioner") if spec is not None else None
        if not isinstance(stanza, dict) or stanza.get("provisioner_name") != PROVISIONER:
            raise SandboxConflictError(
                f"The kernelspec {record.kernel_name!r} of the kernel is not for sandboxes any more"
            )
        factory = KernelProvisionerFactory.instance(parent=manager)
        manager.provisioner = factory.create_provisioner_instance(
            record.kernel_id, spec, parent=manager
        )
        run_sync(manager.provisioner.load_provisioner_info)(record.told())
        # It takes its connection file along when it is collected.
        self._manager = manager


def _console(connection_file: str) -> int:
    """Run the console in this terminal and return its exit code."""
    argv = [sys.executable, "-m", _CONSOLE, "--existing", connection_file]
    # Ctrl-C is for the console. Ignored here it would be ignored there as well.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(argv) as console:  # noqa: S603
            return console.wait()
    finally:
        signal.signal(signal.SIGINT, before)
