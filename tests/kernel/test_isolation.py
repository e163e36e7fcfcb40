"""What code in a kernel can reach: nothing outside, and nothing of ours inside."""

from __future__ import annotations

import json

from jupyter_client.manager import AsyncKernelManager

from tests.engines import Engines
from tests.kernel.conftest import MakeManager, connect, containers_of, evaluate

LOOK = r"""
import json, os, socket
def status(pid="self"):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.rstrip().split(":\t", 1) for line in file if ":\t" in line)
def attempt(work):
    try:
        work()
        return "done"
    except OSError as error:
        return os.strerror(error.errno)
ours = {}
for pid in (p for p in os.listdir("/proc") if p.isdigit()):
    uid = status(pid)["Uid"].split()[0]
    ours.setdefault(uid, []).append(int(pid))
"""


async def started(manager: AsyncKernelManager) -> AsyncKernelManager:
    await manager.start_kernel()
    return manager


async def test_code_runs_unprivileged_with_nothing_but_loopback(make_manager: MakeManager) -> None:
    """B1, B3, ESC-01, ESC-10, NET-01, peers 16: as seen from a cell."""
    client = await connect(await started(make_manager()))
    seen = await evaluate(
        client,
        LOOK
        + r"""
s = status()
print(json.dumps({
    "uid": os.getuid(), "cwd": os.getcwd(), "host": socket.gethostname(),
    "caps": [s[c] for c in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "nnp": s["NoNewPrivs"], "seccomp": s["Seccomp"],
    "localhost": socket.gethostbyname("localhost"),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "connect": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 2)),
    "writable": [d for d in ("/", "/etc", "/usr", "/opt", "/var/tmp", "/root", "/sys", "/run",
                 "/tmp", "/home/sbx", "/workspace", "/dev/shm")
                 if attempt(lambda: open(d + "/probe", "w").close()) == "done"],
}))""",
    )
    client.stop_channels()
    assert seen == {
        "uid": 10001,
        "cwd": "/workspace",
        "host": "sandbox",
        "caps": ["0" * 16] * 5,
        "nnp": "1",
        "seccomp": "2",
        "localhost": "127.0.0.1",
        "interfaces": ["lo"],
        "connect": "Network is unreachable",
        "writable": ["/tmp", "/home/sbx", "/workspace", "/dev/shm"],
    }


async def test_code_cannot_read_signal_or_write_to_relay_and_main_process(
    make_manager: MakeManager,
) -> None:
    """MUX-01, MUX-02, ESC-07, RES-19: two uids, two worlds."""
    client = await connect(await started(make_manager()))
    seen = await evaluate(
        client,
        LOOK
        + r"""
import signal, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def ptrace(pid):
    if libc.ptrace(16, pid, 0, 0):
        raise OSError(ctypes.get_errno(), "")
results = {}
for pid in ours["10002"]:
    results[pid] = sorted({
        attempt(lambda: os.open(f"/proc/{pid}/fd/0", os.O_RDONLY)),
        attempt(lambda: os.open(f"/proc/{pid}/fd/1", os.O_WRONLY)),
        attempt(lambda: open(f"/proc/{pid}/environ").read()),
        attempt(lambda: open(f"/proc/{pid}/mem", "r+b")),
        attempt(lambda: os.kill(pid, signal.SIGSTOP)),
        attempt(lambda: os.kill(pid, signal.SIGKILL)),
        attempt(lambda: ptrace(pid)),
    })
print(json.dumps({"uids": sorted(ours), "results": list(results.values())}))""",
    )
    client.stop_channels()
    assert seen["uids"] == ["10001", "10002"]
    assert len(seen["results"]) >= 2
    for refusals in seen["results"]:
        assert set(refusals) <= {"Permission denied", "Operation not permitted"}


async def test_planted_modules_are_never_imported_by_our_programs(
    make_manager: MakeManager,
) -> None:
    """MUX-17, TEN-08: nothing in a folder that the user writes to runs as the relay."""
    manager = await started(make_manager())
    client = await connect(manager)
    await evaluate(
        client,
        r"""
import os, pathlib
evil = "import os; open(f'/tmp/ran-{os.getuid()}-{os.getpid()}', 'w').close()\n"
user = pathlib.Path("/home/sbx/.local/lib/python3.11/site-packages")
user.mkdir(parents=True)
for name in ("json", "selectors", "socket", "struct", "tempfile"):
    for folder in ("/workspace", "/home/sbx", "/tmp"):
        pathlib.Path(folder, name + ".py").write_text(evil)
(user / "usercustomize.py").write_text(evil)
""",
    )
    code = manager.provisioner._session.sandbox
    from sandbox_kernel.engine.thread import EngineThread
    from sandbox_kernel.kernel.program import relay_program
    from sandbox_kernel.process.program import loader_argv

    async def start_another_relay() -> None:
        async with await code.exec(loader_argv(), user="10002:10002") as stream:
            await stream.write(relay_program())
            await stream.end_input()
            while await stream.read() is not None:
                pass

    await EngineThread.current().call(start_another_relay)
    ran = await evaluate(
        client,
        "import json, os; print(json.dumps([n for n in os.listdir('/tmp') if n[:4] == 'ran-']))",
    )
    client.stop_channels()
    assert ran == []


async def test_keys_and_variables_show_in_no_argv_and_no_configuration(
    make_manager: MakeManager, engines: Engines, monkeypatch
) -> None:
    """B12, SEC-01, SEC-02: secrets reach the kernel and nothing else."""
    monkeypatch.setenv("JUPYTER_TOKEN", "token-of-the-server")
    monkeypatch.setenv("KEPT_BY_NAME", "kept")
    manager = await started(
        make_manager(environment={"MINE": "secret-of-mine"}, env_keep=["KEPT_BY_NAME"])
    )
    client = await connect(manager)
    seen = await evaluate(
        client,
        LOOK
        + r"""
lines = [open(f"/proc/{p}/cmdline").read() for pids in ours.values() for p in pids
         if p != os.getpid()]
print(json.dumps({"env": dict(os.environ), "argv": "\n".join(lines)}))""",
    )
    client.stop_channels()
    inspected = json.dumps(engines.api.inspect(containers_of(engines, manager)[0]["Id"]))
    assert seen["env"]["MINE"] == "secret-of-mine"
    assert seen["env"]["KEPT_BY_NAME"] == "kept"
    assert "token-of-the-server" not in json.dumps(seen)
    key = manager.session.key.decode()
    for public in (seen["argv"], inspected, repr(manager.provisioner._order)):
        assert "secret-of-mine" not in public
        assert key not in public
