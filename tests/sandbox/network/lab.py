"""A laboratory for networks: an engine in a network namespace of its own, with an outside.

Two namespaces are joined by one cable. In the first runs a Docker engine that may set firewall
rules, and that tests may restart, or leave without a firewall, since nobody else uses it. The
second plays the rest of the world: a metadata service, private networks, a public host, a
resolver. No packet leaves the two, and nothing of the test's machine is in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path
from typing import Any

from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.sandbox.firewall import FirewallPlan
from tests.engines import Api, MissingEngineError, busybox_archive, wait_until

ENGINE = "10.77.0.2"
"""The engine's machine on the cable; the engine takes orders there on `CONTROL_PORT`."""

CONTROL_PORT = 2376
RESOLVER = "198.51.100.53"
LOOPBACK_RESOLVER = "127.0.0.53"
PUBLIC = "203.0.113.10"
METADATA = "169.254.169.254"
PRIVATE = ("10.1.2.3", "172.30.9.9", "192.168.77.7", "100.64.0.9")
PUBLISHED_PORT = 8080

_ROUTER = "10.77.0.1"
_IMAGE = "sandbox-kernel-test/lab:latest"
_LEFT_OUT = {"test", "tests", "idlelib", "ensurepip", "lib2to3", "tkinter", "turtledemo",
             "site-packages", "__pycache__", "pydoc_data", "distutils"}  # fmt: skip


def python_files() -> dict[str, bytes]:
    """Return the Python that runs this, with its libraries, as files of an image."""
    program = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    files = {program}
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and "config-" not in name]
        files |= {Path(folder, name) for name in names if name.endswith((".py", ".so"))}
    shared = [str(file) for file in files if file.suffix == ".so"]
    listed = subprocess.run(["ldd", program, *shared], capture_output=True, text=True, check=False)
    for line in listed.stdout.splitlines():
        words = [word for word in line.split() if word.startswith("/") and not word.endswith(":")]
        files |= {Path(word) for word in words}
    starter = f'#!/bin/sh\nexec {program} "$@"\n'
    return {
        "bin/python3": starter.encode(),
        **{str(file).lstrip("/"): file.read_bytes() for file in files if file.is_file()},
    }


class NetworkLab:
    """One laboratory; `close` takes all of it away."""

    def __init__(self) -> None:
        self.name = f"sbxlab-{uuid.uuid4().hex[:8]}"
        # Short: the engine's sockets lie in it.
        self.state = Path(tempfile.mkdtemp(prefix="sbxlab-"))
        self.socket = str(self.state / "docker.sock")
        self.image = _IMAGE
        self._processes: list[subprocess.Popen[bytes]] = []
        self._engine: subprocess.Popen[bytes] | None = None
        for tool in ("ip", "nsenter", "unshare", "dockerd", "iptables", "nft"):
            if shutil.which(tool) is None:
                raise MissingEngineError(f"The tests of networks need {tool} (see .ci/run)")

    @property
    def inside(self) -> str:
        """The namespace of the engine."""
        return f"{self.name}-e"

    @property
    def outside(self) -> str:
        """The namespace of the rest of the world."""
        return f"{self.name}-o"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"unix://{self.socket}", None, "the laboratory")

    @property
    def api(self) -> Api:
        return Api(self.socket)

    # -- life -------------------------------------------------------------------------------------

    def open(self) -> None:
        for name in (self.inside, self.outside):
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "eth0", "netns", self.inside,
            "type", "veth", "peer", "name", "eth0", "netns", self.outside)  # fmt: skip
        for name, address in ((self.inside, ENGINE), (self.outside, _ROUTER)):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
        run("ip", "-n", self.inside, "route", "add", "default", "via", _ROUTER)
        addresses = (RESOLVER, PUBLIC, METADATA, *PRIVATE)
        for address in addresses:
            run("ip", "-n", self.outside, "addr", "add", f"{address}/32", "dev", "lo")
        words = [f"tcp:{address}:80" for address in (PUBLIC, METADATA, *PRIVATE)]
        words += [f"tcp:{PUBLIC}:{port}" for port in (25, 53, 443, 853)]
        self._serve(self.outside, *words, f"dns:{RESOLVER}", f"dns:{PUBLIC}")
        # A service of the engine's machine, and a resolver as systemd-resolved has one.
        self._serve(self.inside, "tcp:0.0.0.0:22", f"dns:{LOOPBACK_RESOLVER}")
        self.start_engine()
        self.api.import_image(busybox_archive(python_files()), _IMAGE, ["ENV PATH=/bin"])
        self._publish_a_port()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            for container in self.api.containers():
                self.api.remove(container["Id"])
        self.stop_engine()
        for process in self._processes:
            process.kill()
            process.wait()
        for name in (self.inside, self.outside):
            subprocess.run(["ip", "netns", "delete", name], check=False)
        shutil.rmtree(self.state, ignore_errors=True)

    def start_engine(self) -> None:
        resolv = self.state / "resolv.conf"
        resolv.write_text(f"nameserver {LOOPBACK_RESOLVER}\n")
        for stale in ("docker.pid", "docker.sock"):
            (self.state / stale).unlink(missing_ok=True)
        # A mount namespace of its own, for its resolv.conf, and so that nothing stays mounted.
        script = 'mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'
        engine = [
            "dockerd", "--data-root", self.state / "data", "--exec-root", self.state / "exec",
            "--pidfile", self.state / "docker.pid", "--containerd-namespace", self.name,
            "--containerd-plugins-namespace", f"{self.name}-plugins", "--shutdown-timeout", "3",
            "--host", f"unix://{self.socket}", "--host", f"tcp://{ENGINE}:{CONTROL_PORT}",
            "--tls=false",
        ]  # fmt: skip
        with (self.state / "dockerd.log").open("ab") as log:
            self._engine = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.inside}", "unshare", "--mount",
                 "sh", "-ec", script, "sh", resolv, *engine],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, 60, "the laboratory's engine")

    def stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.send_signal(signal.SIGTERM)
        try:
            engine.wait(30)
        except subprocess.TimeoutExpired:
            engine.kill()
            engine.wait()

    def restart_engine(self) -> None:
        self.stop_engine()
        self.start_engine()

    def _answers(self) -> bool:
        assert self._engine is not None
        if self._engine.poll() is not None:
            log = (self.state / "dockerd.log").read_text(errors="replace")
            raise MissingEngineError(f"The laboratory's engine ended: {log[-2000:]}")
        try:
            return bool(self.api.get("/_ping") == "OK")
        except OSError:
            return False

    def _publish_a_port(self) -> None:
        """Have a container of somebody else's publish a port on the engine's machine."""
        body = {
            "Image": _IMAGE,
            "Cmd": ["nc", "-ll", "-p", "80", "-e", "/bin/true"],
            "ExposedPorts": {"80/tcp": {}},
            "HostConfig": {
                "PortBindings": {"80/tcp": [{"HostIp": ENGINE, "HostPort": str(PUBLISHED_PORT)}]},
                "RestartPolicy": {"Name": "always"},
            },
        }
        created = self.post("/containers/create", body)
        self.post(f"/containers/{created['Id']}/start")

    # -- what tests do with it --------------------------------------------------------------------

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.api.request("POST", path, body={} if body is None else body)
        return json.loads(answer) if answer else None

    def in_engine(self, *command: str | Path, stdin: str | None = None, check: bool = True) -> str:
        """Run a command on the engine's machine, as far as the network is concerned."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.inside, *command],
            input=stdin, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def clear_firewall(self) -> None:
        """Take every rule away that is not the engine's."""
        self.in_engine("nft", "delete", "table", "inet", "sandbox_kernel", check=False)
        self.in_engine("iptables", "-F", "DOCKER-USER")
        self.in_engine("iptables", "-A", "DOCKER-USER", "-j", "RETURN")
        for program in ("iptables", "ip6tables"):
            self.in_engine(program, "-F", "INPUT")
        self.in_engine("ip6tables", "-F", "FORWARD")
        self.bridge_filter(True)

    def bridge_filter(self, on: bool) -> None:
        """Whether rules apply to what a bridge passes between its own ports."""
        self.in_engine("sysctl", "-q", f"net.bridge.bridge-nf-call-iptables={int(on)}")

    def questions(self) -> list[tuple[str, str]]:
        """Return which resolver was asked for which name, on either side of the cable."""
        lines: list[str] = []
        for log in self.state.glob("*.questions"):
            lines += log.read_text().splitlines()
        return [(host, name) for host, _, name in (line.partition(" ") for line in lines) if name]

    def _serve(self, namespace: str, *words: str) -> None:
        log = self.state / f"{namespace}.questions"
        program = Path(__file__).with_name("outside.py")
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, program, log, *words],
            stdin=subprocess.DEVNULL,
        )
        self._processes.append(process)
        wait_until(lambda: log.exists() and "ready" in log.read_text(), 20, "the outside")


def load_rules(lab: NetworkLab, form: str) -> None:
    """Put the product's rules in force, in one of its forms, and no others; or none at all."""
    lab.clear_firewall()
    plan = FirewallPlan((RESOLVER,), (ENGINE,))
    if form == "nft":
        lab.in_engine("nft", "-f", "-", stdin=plan.render("nft"))
    elif form == "iptables":
        lab.in_engine("sh", "-s", "apply", stdin=plan.render("iptables"))


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
