"""`lease.sh` by itself, in every shell that an image may have (decision 7)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandbox.lease import (
    ANSWER,
    LIFETIME,
    NO_CLOCK,
    RELEASED,
    RENEWAL,
    SILENCE,
    lease_command,
    lease_text,
)

SHELLS = {"dash": ["dash"], "bash": ["bash"], "ash": ["busybox", "ash"], "dash alone": ["dash"]}


class Lease:
    """The loop as a process of this machine."""

    def __init__(self, argv: list[str], path: str) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": path},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def answer(self) -> bytes:
        return self.stdout.readline()

    def renew(self) -> bytes:
        self.stdin.write(RENEWAL)
        self.stdin.flush()
        return self.answer()

    def end(self, within: float = 10) -> tuple[int, float]:
        code = self.process.wait(within)
        return code, time.monotonic() - self.began


class Shell:
    """Starts the loop in one shell; `alone` when that has no timed read and no bash beside it."""

    def __init__(self, argv: list[str], path: str, alone: bool) -> None:
        self.alone = alone
        self.started: list[Lease] = []
        self._argv, self._path = argv, path

    def __call__(self, ttl: int, lifetime: int = 0) -> Lease:
        lease = Lease([*self._argv, *lease_command(ttl, lifetime)[1:]], self._path)
        self.started.append(lease)
        assert lease.answer() == ANSWER
        return lease


@pytest.fixture(params=sorted(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    argv, path = list(SHELLS[request.param]), os.environ["PATH"]
    program = shutil.which(argv[0])
    if program is None:
        pytest.fail(f"this machine lacks {argv[0]}, which the tests need", pytrace=False)
    argv[0] = program
    if request.param == "dash alone":
        sleep = shutil.which("sleep")
        assert sleep is not None
        (tmp_path / "sleep").symlink_to(sleep)
        path = str(tmp_path)
    made = Shell(argv, path, request.param == "dash alone")
    yield made
    for lease in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(lease.process.pid, signal.SIGKILL)
        lease.process.wait(5)
        with contextlib.suppress(BrokenPipeError):
            lease.stdin.close()
        lease.stdout.close()


def test_it_ends_at_once_when_the_owner_lets_go(shell: Shell) -> None:
    lease = shell(60)
    lease.stdin.close()
    code, took = lease.end()
    assert code == RELEASED
    assert took < 1


def test_it_ends_at_once_also_when_a_lifetime_is_set(shell: Shell) -> None:
    lease = shell(60, 100)
    lease.stdin.close()
    assert lease.end()[0] == RELEASED


def test_silence_ends_it_after_the_ttl_and_not_before(shell: Shell) -> None:
    code, took = shell(2).end()
    assert code == SILENCE
    assert 2 <= took < 4


def test_renewals_keep_it_and_each_is_answered(shell: Shell) -> None:
    lease = shell(2)
    while time.monotonic() - lease.began < 4:
        assert lease.renew() == ANSWER
        time.sleep(0.5)
    assert lease.process.poll() is None
    lease.stdin.close()
    assert lease.end()[0] == RELEASED


def test_renewals_do_not_keep_it_beyond_its_lifetime(shell: Shell) -> None:
    lease = shell(2, 3)
    with contextlib.suppress(BrokenPipeError):
        while lease.renew():
            time.sleep(0.2)
    code, took = lease.end()
    assert code == LIFETIME
    assert 2.9 <= took < 4.5


def test_a_burst_of_renewals_as_after_a_pause_is_taken(shell: Shell) -> None:
    lease = shell(3)
    lease.stdin.write(RENEWAL * 500)
    lease.stdin.flush()
    for _ in range(500):
        assert lease.answer() == ANSWER
    lease.stdin.close()
    assert lease.end()[0] == RELEASED


def test_the_time_for_which_it_was_paused_is_not_silence(shell: Shell) -> None:
    """A paused sandbox does not tick, so the owner who goes on renewing does not lose it."""
    lease = shell(3)
    os.killpg(lease.process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.killpg(lease.process.pid, signal.SIGCONT)
    for _ in range(8):
        # bash forgets a line that is there at the moment of its timeout; two others follow
        # within the ttl.
        lease.stdin.write(RENEWAL)
        lease.stdin.flush()
        time.sleep(0.5)
    assert lease.process.poll() is None


def test_a_clock_that_cannot_go_on_ends_it(
    shell: Shell,
) -> None:
    """RES-01: at the process limit; only a shell without a timed read needs a process."""
    lease = shell(40)
    children = _children(lease.process.pid)
    if not shell.alone:
        assert children == []
        return
    deadline = time.monotonic() + 5
    while not (sleeping := _children(children[0])) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(sleeping[0], signal.SIGTERM)
    # A signal that comes just before dash begins to read is handled at the next line, and the
    # owner's renewals are such lines.
    for _ in range(30):
        if lease.process.poll() is not None:
            break
        with contextlib.suppress(BrokenPipeError):
            lease.stdin.write(RENEWAL)
            lease.stdin.flush()
        time.sleep(0.25)
    assert lease.end()[0] == NO_CLOCK


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_people_do_not_see_its_comments_in_the_process_list() -> None:
    assert "#" not in lease_text().replace("$#", "").replace("#!", "")
    assert len(lease_text()) < 1500
