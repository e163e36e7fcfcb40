"""Compare the magics with what people use instead, in one run: ``python benchmarks/magics.py``.

``%%sandbox`` takes turns with IPython's ``%%bash`` in one and the same kernel, each through
jupyter_client, as a notebook's cells: much output, with the messages that it takes, and a cell
that does nothing. ``%sandbox_run`` takes turns with ``docker run --rm`` of the same image with the
same flags. ``%%sandbox`` shows 1 MiB of the output unless it is told to show all of it; both are
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from report import Measurement, circumstances, compare, keep, table
from rich.console import Console
from turns import PROGRESS, command_line, read, turns

from sandbox_kernel import Sandbox, SandboxSpec
from sandbox_kernel.config import engine_settings
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.sandbox.live import CODE_USER

CELLS = (
    Measurement("output", "much output", target=0.05),
    Measurement("messages", "… in so many messages", unit="count"),
    Measurement("shown", "… bytes of it shown", unit="bytes"),
    Measurement("true", "a cell that does nothing"),
)
PROGRAMS = (Measurement("fresh", "true in a fresh sandbox", target=1.3),)
PACKAGES = ("ipython", "ipykernel", "jupyter_client", "sandbox-kernel")
PATIENCE = 120.0

BASH, CELL, ALL = "%%bash", "%%sandbox", "%%sandbox, all shown"
DOCKER, RUN = "docker run --rm", "%sandbox_run"

_TIMED = """
import json, subprocess, time
def timed(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
docker = json.loads({command!r})
run = lambda: get_ipython().run_line_magic("sandbox_run", "-q true")
client = lambda: subprocess.run(docker, check=True, stdin=subprocess.DEVNULL)
"""


@dataclass(frozen=True)
class Sizes:
    """How much to do in a turn: bytes of output, cells that do nothing, fresh sandboxes."""

    output: int
    cells: int
    fresh: int


FULL = Sizes(output=5_000_000, cells=10, fresh=3)
QUICK = Sizes(output=50_000, cells=2, fresh=1)

Values = dict[str, dict[str, list[float]]]


class Notebook:
    """A kernel of this Python, and what a cell of it costs."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client

    def cell(self, code: str) -> tuple[float, int, str]:
        """Run a cell; return seconds, messages of output, and the output."""
        texts: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])

        began = time.perf_counter()
        reply = self._client.execute_interactive(
            code, allow_stdin=False, timeout=PATIENCE, output_hook=hear
        )
        took = time.perf_counter() - began
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{code[:40]!r}: {reply['content'].get('evalue')}")
        return took, len(texts), "".join(texts)


@contextlib.contextmanager
def open_notebook() -> Iterator[Notebook]:
    """Start a kernel and end it."""
    manager = KernelManager()
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name="benchmark",
        language="python",
    )
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE)
        notebook = Notebook(client)
        notebook.cell("%load_ext sandbox_magics")
        yield notebook
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def measure_cells(notebook: Notebook, name: str, sizes: Sizes, values: Values) -> None:
    """Let one way of running a cell do everything once."""
    own = values[name]
    magic = {BASH: "%%bash", CELL: "%%sandbox", ALL: "%%sandbox --display-limit 1G"}[name]
    lines = sizes.output // 100
    script = f"yes {'x' * 99} | head -n {lines}"
    if magic != "%%bash":
        # `yes` is ended by its pipe, which a strict shell takes for a failure.
        script = f"set +o pipefail; {script}"
    took, messages, text = notebook.cell(f"{magic}\n{script}")
    own["output"].append(took)
    own["messages"].append(messages)
    own["shown"].append(len(text))
    for _ in range(sizes.cells):
        own["true"].append(notebook.cell(f"{magic}\ntrue")[0])


def measure_programs(notebook: Notebook, name: str, sizes: Sizes, values: Values) -> None:
    """Let one way of running a program in a fresh sandbox do it."""
    work = {DOCKER: "client", RUN: "run"}[name]
    code = f"print(json.dumps([timed({work}) for _ in range({sizes.fresh})]))"
    values[name]["fresh"] += json.loads(notebook.cell(code)[2])


async def docker_command(endpoint: Endpoint, folder: Path) -> list[str]:
    """Return a docker command line that asks for what a sandbox's container has.

    Paths that are masked have no flag, nor has a network that is not even written down.
    """
    spec = SandboxSpec(labels={"made-by": "benchmarks/magics.py"})
    async with Engine(endpoint) as engine, Sandbox.create(spec) as sandbox:
        told = await engine.inspect_container(sandbox.id)
    host: Mapping[str, Any] = told["HostConfig"]
    seccomp = folder / "seccomp.json"
    command = [shutil.which("docker") or "", f"--host={endpoint.url.replace('https:', 'tcp:')}"]
    if (tls := endpoint.tls) is not None:
        command += ["--tlsverify", f"--tlscert={tls.cert}", f"--tlskey={tls.key}"]
        command += [f"--tlscacert={tls.ca}"]
    command += ["run", "--rm", "--pull=never", "--network=none", "--read-only", "--init"]
    command += ["--cap-drop=ALL", "--ipc=private", "--cgroupns=private", "--log-driver=none"]
    command += [f"--user={CODE_USER}", "--workdir=/workspace", "--volume=/workspace"]
    command += [f"--memory={host['Memory']}", f"--memory-swap={host['MemorySwap']}"]
    command += [f"--cpus={host['NanoCpus'] / 1e9:g}", f"--cpu-shares={host['CpuShares']}"]
    command += [f"--pids-limit={host['PidsLimit']}", f"--shm-size={host['ShmSize']}"]
    command += [f"--oom-score-adj={host['OomScoreAdj']}", "--entrypoint="]
    for option in host["SecurityOpt"]:
        if option.startswith("seccomp="):
            seccomp.write_text(option.removeprefix("seccomp="))
            option = f"seccomp={seccomp}"
        command.append(f"--security-opt={option}")
    command += [f"--ulimit={u['Name']}={u['Soft']}:{u['Hard']}" for u in host["Ulimits"]]
    command += [f"--tmpfs={place}:{text}" for place, text in host["Tmpfs"].items()]
    command += [f"--sysctl={name}={text}" for name, text in host["Sysctls"].items()]
    command += [f"--dns={server}" for server in host["Dns"]]
    return [*command, told["Image"], "true"]


def run(endpoint: Endpoint, rounds: int, sizes: Sizes) -> Values:
    """Let all take turns, and return the values of each."""
    values: Values = defaultdict(lambda: defaultdict(list))
    programs = [DOCKER, RUN] if shutil.which("docker") else [RUN]
    with tempfile.TemporaryDirectory() as folder, open_notebook() as notebook:
        command = asyncio.run(docker_command(endpoint, Path(folder)))
        notebook.cell(_TIMED.format(command=json.dumps(command)))
        # The first of everything is slower: a session is made, images are read from disk.
        for name in programs:
            measure_programs(notebook, name, QUICK, defaultdict(lambda: defaultdict(list)))
        for magic in ("%%bash", "%%sandbox"):
            notebook.cell(f"{magic}\ntrue")
        ways = [*((measure_cells, name) for name in (BASH, CELL, ALL))]
        ways += [(measure_programs, name) for name in programs]
        for _, (measure, name) in turns(ways, [name for _, name in ways], rounds):
            measure(notebook, name, sizes, values)
    return {name: values[name] for name in (BASH, CELL, ALL, *programs)}


def main() -> None:
    """Measure, show and keep."""
    options = read(command_line(__doc__ or "", rounds=3))
    sizes, rounds = QUICK if options.quick else FULL, options.rounds
    values = run(resolve_endpoint(engine_settings()), rounds, sizes)
    cells = {name: values[name] for name in (BASH, CELL, ALL)}
    programs = {name: own for name, own in values.items() if name not in cells}
    summary = {
        **circumstances(rounds, sizes, PACKAGES, (*CELLS, *PROGRAMS)),
        "cells": compare(cells, BASH),
        "programs": compare(programs, next(iter(programs))),
    }
    load = summary["machine"]["load"][0]
    title = f"Medians: {sizes.output:,} bytes of output, {rounds} rounds; load {load} at the end"
    Console().print(table(title, CELLS, summary["cells"], BASH))
    Console().print(
        table(
            "Medians: a fresh sandbox",
            PROGRAMS,
            summary["programs"],
            next(iter(summary["programs"])),
        )
    )
    PROGRESS.print(f"Written to {keep(summary, 'magics', options.json)}")


if __name__ == "__main__":
    main()
