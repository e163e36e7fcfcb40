"""An engine that a test may kill, freeze and restart, since nobody else uses it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.engines import Engines, wait_until

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "test-engine")
BOUND = 60.0


class PrivateEngine:
    """A second dockerd, made by ``scripts/test-engine`` in a folder of its own."""

    def __init__(self, engines: Engines, state: Path) -> None:
        self.engines = engines
        self._state = state
        self._argv = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")[:-1]
        self._launched: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int:
        return int((self._state / "docker.pid").read_text())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self, number: signal.Signals) -> None:
        """Send a signal and wait until the engine is gone."""
        pid = self.pid
        os.kill(pid, number)

        def gone() -> bool:
            for launched in self._launched:
                launched.poll()
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
            except OSError:
                return True
            return state[0] in "ZX"

        wait_until(gone, BOUND, "the end of the engine")

    def start(self, *options: str) -> None:
        """Start it again, as it was and with these options too."""
        # A killed engine's containerd dies with it, but may stay as a zombie, which would be
        # taken for one that still runs.
        (self._state / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)
        (self._state / "docker.pid").unlink(missing_ok=True)
        with (self._state / "dockerd.log").open("ab") as log:
            self._launched.append(
                subprocess.Popen(
                    [*self._argv, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
        wait_until(self.answers, BOUND, "the start of the engine")

    def answers(self) -> bool:
        try:
            self.engines.api.get("/_ping")
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Remove its containers, for which it has to run."""
        with contextlib.suppress(OSError):
            self.signal(signal.SIGCONT)
        if not self.answers():
            self.start()
        for container in self.engines.api.containers():
            self.engines.api.remove(container["Id"])

    def reap(self) -> None:
        for launched in self._launched:
            launched.wait(BOUND)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def private_engine() -> Iterator[PrivateEngine]:
    """Give an engine and clear it away with all that it ran."""
    # Short: the engine's sockets lie in it.
    state = Path(tempfile.mkdtemp(prefix="sbxown-"))
    place = ["--state-dir", str(state)]
    try:
        started = subprocess.run(
            [SCRIPT, "start", *place, "--port", str(free_port())],
            check=True,
            capture_output=True,
            text=True,
            timeout=BOUND,
        )
        values = dict(re.findall(r"export SANDBOX_TEST_ENGINE_(\w+)=(\S+)", started.stdout))
        private = PrivateEngine(
            Engines(values["UNIX"], values["TLS"], Path(values["CERTS"])), state
        )
        try:
            yield private
        finally:
            private.clear()
    finally:
        subprocess.run([SCRIPT, "stop", *place, "--purge"], check=False, timeout=BOUND)
        shutil.rmtree(state, ignore_errors=True)
