"""The blocking twins: everywhere without an event loop, and interrupted like any other call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandbox_kernel import (
    BlockingFiles,
    BlockingProcess,
    BlockingSandbox,
    BlockingWorkspaces,
    Chunk,
    CommandFailedError,
    EngineSettings,
    Exit,
    Sandbox,
    SandboxExecTimeoutError,
    SandboxFiles,
    SandboxGoneError,
    SandboxProcess,
    SandboxSpec,
    SandboxSpecRejectedError,
    SandboxWorkspaces,
    connect_sandbox,
    find_sandboxes,
    open_sandbox,
)
from sandbox_kernel.engine.client import Engine
from tests.engines import Engines, wait_until

Open = Callable[..., BlockingSandbox]


@pytest.fixture
def open_one(settings: EngineSettings, owner: str, python_image: str) -> Open:
    """`open_sandbox` for a test: with its engine, its image and its owner."""

    def make(**options: Any) -> BlockingSandbox:
        spec = SandboxSpec(**{"image": python_image, **options.pop("spec", {})})
        return open_sandbox(spec, **{"engine": settings, "owner": owner, **options})

    return make


def use(sandbox: BlockingSandbox) -> None:
    """Do what one does with a sandbox."""
    result = sandbox.run(["cat"], stdin="hello", timeout=60)
    assert (result.returncode, result.stdout) == (0, b"hello")
    assert sandbox.shell("echo $V; exit 3", env={"V": "x"}).stdout_text == "x\n"
    with sandbox.start(["cat"], timeout=None) as process:
        assert process.pid > 1
        process.write("one")
        assert process.read() == Chunk(1, b"one")
        process.end_input()
        assert list(process.output) == [Exit(0, "finished")]
        assert process.wait() == Exit(0, "finished")
        assert process.returncode == 0
    with sandbox.start(["sleep", "8100"]) as process:
        assert process.kill().found == "killed"
        assert list(process) == [Exit(137, "killed")]
    assert sandbox.files.put(b"hello", "a/file").size == 5
    assert sandbox.files.read("a/file") == b"hello"
    with sandbox.start(["sleep", "8102"]) as process:
        process.interrupt()
        assert process.wait() == Exit(130, "interrupted")


def test_a_script_needs_no_loop(open_one: Open) -> None:
    """Issue 3: the same methods and options as the async form."""
    with open_one() as sandbox:
        use(sandbox)
        assert sandbox.kill() == "processes"
        with pytest.raises(CommandFailedError):
            sandbox.shell("exit 3", check=True)
        with pytest.raises(SandboxExecTimeoutError):
            sandbox.run(["sleep", "8101"], timeout=0.5)
        with pytest.raises(SandboxSpecRejectedError, match="shell"):
            sandbox.run("ls")
        assert sandbox.ended is None
        assert repr(sandbox) == f"<BlockingSandbox {sandbox.name} running>"
    assert sandbox.wait().kind == "removed"
    sandbox.destroy()
    with pytest.raises(SandboxGoneError):
        sandbox.run(["true"])


async def test_it_works_where_a_loop_runs(open_one: Open) -> None:
    """Issue 3, decision 5: a notebook's cell."""
    with open_one() as sandbox:
        use(sandbox)


def test_several_threads_use_one_sandbox_at_once(open_one: Open) -> None:
    """Decision 5: each waits for its own."""
    with open_one() as sandbox, concurrent.futures.ThreadPoolExecutor(5) as pool:
        codes = pool.map(lambda code: sandbox.shell(f"exit {code}").returncode, range(5))
        assert list(codes) == list(range(5))


async def test_an_open_engine_is_refused(engine: Engine) -> None:
    """Issue 3: it could only be used in the loop that would be blocked."""
    with pytest.raises(SandboxSpecRejectedError, match=r"engine.*own event loop"):
        open_sandbox(engine=engine)


@pytest.mark.parametrize(
    ("blocking", "twin", "only_async", "only_blocking"),
    [
        (BlockingSandbox, Sandbox, {"create", "from_order", "connect", "find_all"}, set()),
        (BlockingProcess, SandboxProcess, {"read_now"}, set()),
        (BlockingFiles, SandboxFiles, set(), set()),
        (BlockingWorkspaces, SandboxWorkspaces, set(), set()),
    ],
)
def test_the_twins_have_the_same_methods_with_the_same_parameters(
    blocking: type, twin: type, only_async: set[str], only_blocking: set[str]
) -> None:
    """Issue 3: what `help` and completion show."""

    def methods(owner: type) -> dict[str, Any]:
        return {n: m for n, m in inspect.getmembers(owner) if not n.startswith("_")}

    ours, theirs = methods(blocking), methods(twin)
    assert set(theirs) - set(ours) == only_async
    assert set(ours) - set(theirs) == only_blocking
    for name in ours:
        if inspect.isfunction(ours[name]) and name != "read":
            ours_, theirs_ = inspect.signature(ours[name]), inspect.signature(theirs[name])
            assert ours_.parameters == theirs_.parameters, name
            assert not inspect.iscoroutinefunction(ours[name])
            assert "await " not in (ours[name].__doc__ or "")
    create = inspect.signature(Sandbox.create)
    assert inspect.signature(open_sandbox).parameters == create.parameters
    assert "open_sandbox(" in (open_sandbox.__doc__ or "")
    connect = inspect.signature(Sandbox.connect)
    assert inspect.signature(connect_sandbox).parameters == connect.parameters
    found = inspect.signature(Sandbox.find_all)
    assert inspect.signature(find_sandboxes).parameters == found.parameters


# -- processes that are interrupted or killed -----------------------------------------------------

PRELUDE = """
    import json, os, pathlib, signal, sys
    from sandbox_kernel import EngineSettings, SandboxSpec, SandboxError, open_sandbox
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.argv[1])
    for name, value in given["engine"].items():
        if name.endswith("_path") and value:
            given["engine"][name] = pathlib.Path(value)
    def open_one():
        spec = SandboxSpec(image=given["image"])
        return open_sandbox(spec, engine=EngineSettings(**given["engine"]), owner=given["owner"])
    def say(*words):
        print(*words, flush=True)
"""
StartScript = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start_script(
    settings: EngineSettings, owner: str, python_image: str
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start Python code that uses the blocking twin."""
    engine = {k: v and str(v) for k, v in dataclasses.asdict(settings).items()}
    given = json.dumps({"engine": engine, "image": python_image, "owner": owner})
    with contextlib.ExitStack() as stack:

        def start(code: str) -> subprocess.Popen[str]:
            whole = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
            script = subprocess.Popen(
                [sys.executable, "-X", "dev", "-c", whole, given],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(script)
            stack.callback(script.kill)
            return script

        yield start


def said(script: subprocess.Popen[str]) -> str:
    assert script.stdout is not None
    line = script.stdout.readline().strip()
    if not line:
        script.kill()
        pytest.fail(f"the script said nothing: {script.communicate(timeout=30)[1]}")
    return line


def until_running(engines: Engines, container: str, command: str) -> None:
    def runs() -> bool:
        shown = engines.api.get(f"/containers/{container}/top")
        return any(command in " ".join(line) for line in shown["Processes"])

    wait_until(runs, 30, f"{command} in the sandbox")


def finish(script: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = script.communicate(timeout=60)
    return script.returncode, out.strip(), err


@pytest.mark.parametrize(
    "call",
    [
        'sandbox.run(["sleep", "8110"], timeout=None)',
        'list(sandbox.start(["sleep", "8110"], timeout=None).__enter__())',
        'sandbox.start(["sleep", "8110"], timeout=None).wait()',
    ],
)
def test_an_interrupt_stops_what_runs_and_is_raised(
    start_script: StartScript, engines: Engines, call: str
) -> None:
    """Issue 3, W21: Ctrl-C ends a `run` in the sandbox first, and the sandbox after that."""
    runs = call.startswith("sandbox.run")
    script = start_script(f"""
        with open_one() as sandbox:
            say(sandbox.id)
            try:
                {call}
            except KeyboardInterrupt:
                shown = sandbox.shell("cat /proc/[0-9]*/cmdline").stdout_text
                say("sleep\\x008110" in shown)
                raise
    """)
    container = said(script)
    until_running(engines, container, "sleep 8110")
    script.send_signal(signal.SIGINT)
    assert said(script) == ("False" if runs else "True")
    code, _, err = finish(script)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert engines.api.inspect(container) is None


def test_an_interrupt_in_the_block_of_a_process_stops_it(
    start_script: StartScript, engines: Engines
) -> None:
    """Issue 3, W21: `for chunk in process.output`, interrupted."""
    script = start_script("""
        with open_one() as sandbox:
            say(sandbox.id)
            try:
                with sandbox.start(["sh", "-c", "echo up; exec sleep 8111"]) as process:
                    for chunk in process.output:
                        say(chunk.data)
            except KeyboardInterrupt:
                say("sleep\\x008111" in sandbox.shell("cat /proc/[0-9]*/cmdline").stdout_text)
    """)
    container = said(script)
    assert said(script) == repr(b"up\n")
    until_running(engines, container, "sleep 8111")
    script.send_signal(signal.SIGINT)
    assert finish(script)[:2] == (0, "False")


@pytest.mark.parametrize("after", [0.02, 0.15, 0.4])
def test_an_interrupt_while_it_is_made_leaves_nothing(
    start_script: StartScript, after: float
) -> None:
    """Issue 3: the fixture `owner` sees whether something is left."""
    script = start_script("""
        say("begins")
        with open_one() as sandbox:
            say("made")
            signal.pause()
    """)
    assert said(script) == "begins"
    threading.Event().wait(after)  # the moment is the case
    script.send_signal(signal.SIGINT)
    code, _, err = finish(script)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in err


def test_the_end_of_the_process_is_the_end_of_its_sandboxes(
    start_script: StartScript, engines: Engines
) -> None:
    """B13: a script that ends, also by an error, without having closed anything."""
    script = start_script("""
        sandbox = open_one()
        process = sandbox.start(["sleep", "8112"], timeout=None)
        say(sandbox.id)
        sys.exit(3)
    """)
    container = said(script)
    code, _, err = finish(script)
    assert code == 3
    assert "Traceback" not in err
    wait_until(lambda: engines.api.inspect(container) is None, 20, "the end of the sandbox")


def test_nothing_outlives_a_process_that_was_killed(
    start_script: StartScript, engines: Engines
) -> None:
    """B13, decision 7: the lease ends with it."""
    script = start_script("""
        sandbox = open_one()
        process = sandbox.start(["sleep", "8113"], timeout=None)
        say(sandbox.id)
        signal.pause()
    """)
    container = said(script)
    script.kill()
    wait_until(lambda: engines.api.inspect(container) is None, 20, "the end of the sandbox")


def test_a_forked_process_does_not_touch_its_parents_sandbox(start_script: StartScript) -> None:
    """Decision 5: it is told so, its end changes nothing, and it can make one of its own."""
    script = start_script("""
        import gc, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        sandbox = open_one()
        pid = os.fork()
        if pid == 0:
            try:
                sandbox.run(["true"])
            except SandboxError as error:
                say(error)
            with open_one() as own:
                say(own.shell("echo own").stdout_text.strip())
            del sandbox
            gc.collect()
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        say(sandbox.run(["echo", "parent"]).stdout_text.strip())
        sandbox.destroy()
    """)
    assert said(script).startswith("This sandbox belongs to the process that this one was forked")
    assert said(script) == "own"
    code, out, err = finish(script)
    assert (code, out) == (0, "parent"), err


async def test_a_blocked_loop_does_not_stop_the_lease(open_one: Open, engines: Engines) -> None:
    """Decision 5: the engine's loop is not the caller's."""
    with open_one(spec={"lease_ttl": 4}) as sandbox:
        result = sandbox.run(["sleep", "7"])
        assert result.returncode == 0
        assert (await asyncio.to_thread(sandbox.run, ["true"])).returncode == 0
