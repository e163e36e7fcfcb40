"""The commands about sandboxes that are there, and those that run programs in one."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pexpect
import pytest

from sandbox_kernel.app.words import WrongWordsError, split
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.errors import SandboxConflictError, SandboxGoneError
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.found import SandboxInfo, choose
from tests.app.conftest import PROGRAM, CommandLine, clean_environ
from tests.engines import Engines, leftovers, remove_leftovers

PAGE = Path(__file__).parent.parent.parent / "docs" / "commands.md"
KEY = "lab/one"
BOUND = 60.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@dataclasses.dataclass(frozen=True)
class Place:
    """A command line of an owner of its own, and a sandbox of that one that runs."""

    cli: CommandLine
    engines: Engines
    owner: str
    id: str = ""

    def left(self) -> list[str]:
        return [
            thing
            for thing in leftovers(self.engines, f"{labels.OWNER}={self.owner}")
            if self.id[:12] not in thing or not self.id
        ]

    def __call__(self, *words: str, **environ: str) -> str:
        """Call a command that works, and return what it prints."""
        done = self.cli(*words, **environ)
        assert done.code == 0, (words, done.err)
        return done.out

    def piped(self, text: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PROGRAM), *words],
            env=dict(self.cli.environ),
            cwd=self.cli.home,
            input=text,
            capture_output=True,
            text=True,
            timeout=BOUND,
            check=False,
        )


@pytest.fixture(scope="module")
def fresh(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A command line without a sandbox; nothing may be left of what it makes."""
    owner = f"cli-{uuid.uuid4().hex[:12]}"
    home = tmp_path_factory.mktemp("home")
    environ = {
        **clean_environ(home),
        "SANDBOX_DOCKER_HOST": engines.unix,
        "SANDBOX_DOCKER_IMAGE": os.environ.get("SANDBOX_TEST_IMAGE", DEFAULT_IMAGE),
        "JUPYTERHUB_USER": owner,
        "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}",
    }
    place = Place(CommandLine(home, environ), engines, owner)
    try:
        yield place
        wait_until(lambda: not place.left(), f"left on the engine: {place.left()}")
    finally:
        remove_leftovers(engines, f"{labels.OWNER}={owner}")


@pytest.fixture(scope="module")
def place(fresh: Place) -> Iterator[Place]:
    """The same with one sandbox, on a workspace."""
    running = subprocess.Popen(
        [str(PROGRAM), "run", "--workspace", KEY, "--timeout=900", "sleep", "900"],
        env=dict(fresh.cli.environ),
        cwd=fresh.cli.home,
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: fresh.cli("exec", KEY, "true").code == 0, "the sandbox runs")
        [info] = fresh.cli("ls", "--json").json()["sandboxes"]
        yield dataclasses.replace(fresh, id=info["id"])
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(BOUND) == 128 + signal.SIGTERM
        fresh("workspaces", "rm", "-y", KEY)


def test_sandboxes_are_listed_for_people_and_for_programs(place: Place) -> None:
    """B9"""
    [info] = place.cli("list", "--json").json()["sandboxes"]
    assert info["owner"] == place.owner
    assert (info["state"], info["workspace"], info["network"]) == ("running", KEY, "none")
    assert datetime.fromisoformat(info["created"]).tzinfo is not None
    titles, row = place("ls").splitlines()
    assert titles.split()[:3] == ["ID", "NAME", "STATE"]
    assert row.split()[:3] == [place.id[:12], info["name"], "running"]
    assert place("ls", "-q") == f"{place.id[:12]}\n"
    assert place.owner in place("ls", "--all")
    assert place("ls", "-q", "--owner", "nobody else") == ""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("no-such-program",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_exit_codes_are_those_of_docker(place: Place, words: tuple[str, ...], code: int) -> None:
    """Issue 4"""
    assert place.cli("exec", place.id[:6], *words).code == code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--netwrk", "none", "true"), "Did you mean --network"),
        (("run", "--timeout", "soon", "true"), "soon"),
        (("run", "--shell", "true", "true"), "needs either a program"),
        (("run", "-t", "sh"), "needs a terminal"),
        (("run", "-e", "SURELY_NOT_SET", "true"), "SURELY_NOT_SET"),
        (("run", "--engine", "unix:///no/engine.sock", "true"), "no such socket"),
        (("exec", "no-such-sandbox", "true"), "There is no sandbox 'no-such-sandbox'"),
    ],
)
def test_what_is_not_the_programs_fault_has_a_code_of_its_own(
    fresh: Place, words: tuple[str, ...], said: str
) -> None:
    """Issue 4: 125, also for a command line that cannot be read."""
    done = fresh.cli(*words)
    assert done.code == 125
    assert said in done.err


def test_a_run_gets_its_input_and_gives_its_streams_and_leaves_nothing(fresh: Place) -> None:
    """C1, C2, B12"""
    before = fresh.left()
    text = 'sort -n; echo "$ONE $TWO" >&2; exit 3'
    done = fresh.piped("10\n9\n", "run", "-e", 'ONE="~"', "-eTWO=2", "--shell", text)
    assert (done.returncode, done.stdout, done.stderr) == (3, "9\n10\n", '"~" 2\n')
    assert fresh.left() == before
    late = fresh.cli("run", "--timeout", "1", "sleep", "60")
    assert late.code == 124
    assert "still running after 1 s" in late.err
    record = fresh.cli("run", "--json", "echo", "hi").json()
    assert (record["ok"], record["returncode"], record["stdout"]) == (True, 0, "hi\n")


def test_a_reader_that_has_stopped_keeps_no_signal_from_ending_a_run(fresh: Place) -> None:
    """C2: as `run … | less` is, with a page on the screen."""
    before = fresh.left()
    command = [str(PROGRAM), "run", "--shell", "yes"]
    with subprocess.Popen(command, env=dict(fresh.cli.environ), stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.read(2) == b"y\n"
        # Both ends of the line are full by then.
        wait_until(lambda: b"pipe_write" in wchan(run.pid), "a write that is held up")
        run.send_signal(signal.SIGTERM)
        assert run.wait(BOUND) == 128 + signal.SIGTERM
    assert fresh.left() == before


def wchan(pid: int) -> bytes:
    """Return what the threads of a process wait for in the system's kernel."""
    return b" ".join(path.read_bytes() for path in Path(f"/proc/{pid}/task").glob("*/wchan"))


def on_terminal(place: Place, *words: str) -> pexpect.spawn[str]:
    return pexpect.spawn(
        str(PROGRAM),
        list(words),
        env=dict(place.cli.environ),
        timeout=BOUND,
        dimensions=(31, 91),
        encoding="utf-8",
    )


def test_ctrl_c_ends_a_run_and_leaves_nothing(fresh: Place) -> None:
    """C2: the first one reaches the program, the second one ends it whatever it does."""
    before = fresh.left()
    with on_terminal(fresh, "run", "--shell", "echo up; sleep 100") as child:
        child.expect("up")
        child.sendintr()
        child.expect(pexpect.EOF)
    assert child.exitstatus == 130
    ignoring = "import signal,time; signal.signal(2, lambda *_: print('no', flush=True))\n"
    ignoring += "print('up', flush=True)\nwhile True: time.sleep(1)"
    with on_terminal(fresh, "run", "python3", "-c", ignoring) as child:
        child.expect("up")
        child.sendintr()
        child.expect("no")
        child.sendintr()
        child.expect(pexpect.EOF)
    assert child.exitstatus == 130
    assert fresh.left() == before


def test_a_program_gets_the_terminal(place: Place) -> None:
    """W11: its size, later ones, and every key."""
    with on_terminal(place, "exec", "-it", place.id[:8], "sh") as child:
        child.sendline("stty size")
        child.expect("31 91\r\n")
        child.setwinsize(40, 100)
        child.sendline("while [ \"$(stty size)\" != '40 100' ]; do sleep 0.1; done; echo re''sized")
        child.expect("resized")
        child.sendline("sh -c 'echo u\"\"p; exec sleep 1000'")
        child.expect("up")
        child.sendintr()
        child.sendline("exit 5")
        child.expect(pexpect.EOF)
    assert child.exitstatus == 5


def test_files_go_both_ways_and_replace_nothing_unasked(place: Place) -> None:
    """F1, F2"""
    home = place.cli.home
    (home / "tree" / "sub").mkdir(parents=True)
    (home / "tree" / "sub" / "file").write_text("in a tree\n")
    place("cp", "tree", f"workspace:{KEY}:")
    one = place.id[:12]
    # Into a folder that is there.
    place("cp", "tree/sub/file", f"{one}:tree")
    refused = place.cli("cp", "tree/sub/file", f"{one}:tree/file")
    assert refused.code == 1
    assert "--force" in refused.err
    place("cp", "--force", "tree/sub/file", f"{one}:tree/file")
    assert place("cp", f"{one}:tree/file", "-") == "in a tree\n"
    assert place.piped("piped", "cp", "-", f"{one}:piped").returncode == 0
    (home / "here").mkdir()
    place("cp", f"{one}:tree", "here")
    assert (home / "here" / "tree" / "sub" / "file").read_text() == "in a tree\n"
    assert place.cli("cp", f"{one}:piped", "here/tree/sub/file").code == 1
    assert (home / "here" / "tree" / "sub" / "file").read_text() == "in a tree\n"
    assert place.cli("cp", "a", "b").code == 2


def test_a_paused_sandbox_is_resumed_by_the_next_program(place: Place) -> None:
    """B8"""
    one = place.id[:12]
    assert place("pause", one) == f"{one}\n"
    assert place.cli("ls", "--json").json()["sandboxes"][0]["state"] == "paused"
    assert place("exec", KEY, "echo", "awake") == "awake\n"
    assert place.cli("resume", "--json", one).json() == {
        "ok": True, "resumed": [place.id], "errors": [],
    }  # fmt: skip


def test_what_happened_to_a_sandbox_is_told_after_its_end(fresh: Place) -> None:
    """K4, B13: what the engine remembers, unless others have filled its memory meanwhile."""
    with on_terminal(fresh, "run", "--shell", "echo up; sleep 100") as child:
        child.expect("up")
        [one] = [i for i in fresh.cli("ls", "--json").json()["sandboxes"] if not i["workspace"]]
        assert fresh("rm", one["name"]) == f"{one['name']}\n"
        told = fresh.cli("logs", one["id"][:12])
        child.expect(pexpect.EOF)
    assert child.exitstatus == 125
    assert told.code == 1 or "The sandbox was killed on the engine." in told.out
    assert fresh.cli("rm", one["id"]).code == 1
    assert fresh.cli("rm", "-f", one["id"]).code == 0
    assert fresh("reap", "--dry-run") == "There is nothing to clear away.\n"


def test_a_workspace_is_removed_only_when_asked_for_and_not_in_use(place: Place) -> None:
    """B6"""
    unasked = place.cli("workspaces", "rm", KEY)
    assert unasked.code == 2
    assert "-y" in unasked.err
    used = place.cli("workspaces", "rm", "-y", KEY, "--json")
    assert used.code == 1
    [info] = place.cli("ls", "--json").json()["sandboxes"]
    assert info["name"] in used.json()["errors"][0]["text"]
    assert KEY in place("workspaces", "ls")


def test_a_person_is_asked_before_a_workspace_is_removed(fresh: Place) -> None:
    """B6, F4"""
    fresh("run", "--workspace", "w", "--shell", "echo kept > file")
    assert fresh("cp", "workspace:w:file", "-") == "kept\n"
    for answer, left in (("n", True), ("y", False)):
        with on_terminal(fresh, "workspaces", "rm", "w") as child:
            child.expect(re.escape("Remove the workspace 'w' with all that is in it? [y/N]"))
            child.sendline(answer)
            child.expect(pexpect.EOF)
        assert ("w\n" in fresh("workspaces", "ls", "-q")) == left


def test_a_shell_completes_commands_options_and_sandboxes(place: Place) -> None:
    """Issue 4: by the printed script, in a real bash."""

    def completed(line: str) -> list[str]:
        words = [shlex.quote(word) for word in line.split(" ")]
        script = f"""
        source <(jupyter-sandbox completion bash)
        COMP_WORDS=({" ".join(words)}) COMP_CWORD={len(words) - 1}
        function=$(complete -p {words[0]} | sed -n 's/.*-F \\([^ ]*\\).*/\\1/p')
        "$function"; printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(
            ["bash", "--norc", "-c", script],
            env=dict(place.cli.environ), capture_output=True, text=True, timeout=BOUND, check=True,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split("\n")[:-1]

    assert completed("jupyter sandbox re") == ["resume", "reap"]
    assert completed("jupyter sandbox workspaces ex") == ["export"]
    assert "--network" in completed("jupyter-sandbox run --ne")
    assert place.id[:12] in completed(f"jupyter sandbox exec {place.id[:3]}")
    assert completed(f"jupyter-sandbox cp {place.id[:5]}") == [f"{place.id[:12]}:"]
    assert completed("jupyter-sandbox workspaces rm la") == [KEY]


def test_the_page_on_commands_shows_what_happens(fresh: Place, tmp_path: Path) -> None:
    """Issue 4: in one shell, as a reader would; an ellipsis stands for what differs."""
    owner = f"{fresh.owner}-reader"
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE)
    script = "set -u\n" + "".join(
        f"echo '<{number}>'\n{command}\n" for number, (command, _) in enumerate(steps)
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**fresh.cli.environ, "JUPYTERHUB_USER": owner}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    said = re.split(r"^<\d+>\n", done.stdout, flags=re.MULTILINE)[1:]
    assert len(said) == len(steps), done.stderr
    for (command, shown), printed in zip(steps, said, strict=True):
        if "..." not in shown:
            assert printed == shown, (command, done.stderr)
        else:
            assert printed, (command, done.stderr)
    mark = f"{labels.OWNER}={owner}"
    wait_until(lambda: not leftovers(fresh.engines, mark), "the end of the page's sandboxes")


def info(container_id: str, name: str, workspace: str | None = None) -> SandboxInfo:
    now = datetime.now(UTC)
    made = (now, None, {})
    words = ("me", "running", "image", "none", "ephemeral", workspace, "")
    return SandboxInfo(container_id, name, *words, *made)


def test_a_sandbox_is_meant_by_one_thing_only() -> None:
    """B9: what is written in full goes first; what can be several names them."""
    one, two = info("ab12" + "0" * 60, "sbx-one"), info("ab34" + "0" * 60, "sbx-two", "ab12")
    assert choose([one, two], "ab3") is two
    assert choose([one, two], "sbx-one") is one
    assert choose([one, two], "ab12") is two
    with pytest.raises(SandboxConflictError, match=r"ab1200000000 \(sbx-one\), ab3400000000"):
        choose([one, two], "ab")
    with pytest.raises(SandboxGoneError, match="sbx-one"):
        choose([one, two], "sbx")
    with pytest.raises(SandboxGoneError, match="none at all"):
        choose([], "x")


def test_options_are_read_in_one_way() -> None:
    """Issue 4: anywhere before a program, letters together, values as they are."""
    valued, flags = {"e", "env", "image"}, {"i", "t", "json"}
    words = ["-ite", "A=1", "--image=x=y", "--json", "sh", "-c", "--image"]
    options = ["-i", "-t", "-e=A=1", "--image=x=y", "--json"]
    assert split(words, valued, flags, first_word_ends=True) == (options, ["sh", "-c", "--image"])
    mixed = ["a", "--json", "b", "--", "--image"]
    assert split(mixed, valued, flags, first_word_ends=False) == (["--json"], ["a", "b", "--image"])
    for wrong, said in (
        (["--imge", "x"], "Did you mean --image"),
        (["--image"], "--image needs a value"),
        (["--json=1"], "--json takes no value"),
        (["-x"], "there is no option -x"),
    ):
        with pytest.raises(WrongWordsError, match=said):
            split(wrong, valued, flags, first_word_ends=False)
