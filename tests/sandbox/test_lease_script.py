"""`lease.sh` by itself, in every shell that an image may have (decision 7, B7, B8, B13)."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_kernel.sandbox.lease import (
    IDLE,
    LIFETIME,
    NO_CLOCK,
    RELEASED,
    SILENCE,
    lease_command,
    lease_text,
)

SHELLS = {"dash": ["dash"], "bash": ["bash"], "ash": ["busybox", "ash"], "dash alone": ["dash"]}
ALICE, BOB, CAROL = "a11ce", "b0b", "ca401"


class Lease:
    """The loop as a process of this machine."""

    def __init__(self, argv: list[str], path: str) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PATH": path},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def answer(self) -> list[str]:
        return self.stdout.readline().decode().split()

    def say(self, verb: str, ident: str) -> list[str]:
        """Ask, and again when no answer comes: a shell may lose what comes at its timeout."""
        self.send(verb, ident)
        tries = 1
        while not self._hears(1.5) and tries < 5:
            self.send(verb, ident)
            tries += 1
        answer = self.answer()
        while tries > 1 and self._hears(0.5) and self.answer():
            pass
        return answer

    def _hears(self, seconds: float) -> bool:
        return bool(select.select([self.stdout], [], [], seconds)[0])

    def send(self, verb: str, ident: str) -> None:
        self.stdin.write(f"{verb} {ident}\n".encode())
        self.stdin.flush()

    def hold(self, ident: str, seconds: float, verb: str = "keep") -> None:
        """Renew for a while, as a living holder does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(BrokenPipeError):
                self.send(verb, ident)
            time.sleep(0.2)

    def end(self, within: float = 10) -> tuple[int, float]:
        code = self.process.wait(within)
        return code, time.monotonic() - self.began


class Shell:
    """Starts the loop in one shell; `alone` when that has no timed read and no bash beside it."""

    def __init__(self, argv: list[str], path: str, alone: bool, place: Path) -> None:
        self.alone = alone
        self.place = place
        self.meter = place.parent / "meter"
        self.started: list[Lease] = []
        self._argv, self._path = argv, path

    def __call__(self, ttl: int, lifetime: int = 0, idle: int = 0, grace: int = 0) -> Lease:
        command = lease_command(
            ttl,
            lifetime,
            idle=idle,
            grace=grace,
            place=str(self.place),
            meters=[str(self.place / "none"), str(self.meter)],
        )
        lease = Lease([*self._argv, *command[1:]], self._path)
        self.started.append(lease)
        assert lease.answer() == ["workspace", "drwxr-x---", str(os.getuid())]
        assert lease.answer()[:3] == ["lease", "start", "-"]
        return lease

    def held(self, ttl: int, *times: int) -> Lease:
        """A lease that one holder has."""
        lease = self(ttl, *times)
        assert lease.say("join", ALICE)[1:5] == ["join", ALICE, ALICE, "1"]
        return lease


# Images have dash, which hands over to bash, or ash; the others are on request.
USUAL = {"ash", "dash"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow])
        for name in sorted(SHELLS)
    ]
)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    argv, path = list(SHELLS[request.param]), os.environ["PATH"]
    program = shutil.which(argv[0])
    if program is None:
        pytest.fail(f"this machine lacks {argv[0]}, which the tests need", pytrace=False)
    argv[0] = program
    if request.param == "dash alone":
        for name in ("sleep", "ls"):
            found = shutil.which(name)
            assert found is not None
            (tmp_path / name).symlink_to(found)
        path = str(tmp_path)
    place = tmp_path / "workspace"
    place.mkdir(mode=0o750)
    made = Shell(argv, path, request.param == "dash alone", place)
    yield made
    for lease in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(lease.process.pid, signal.SIGKILL)
        lease.process.wait(5)
        with contextlib.suppress(BrokenPipeError):
            lease.stdin.close()
        lease.stdout.close()


# -- one holder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [(), (100,), (100, 50, 50)])
def test_it_ends_at_once_at_the_end_of_its_input(shell: Shell, times: tuple[int, ...]) -> None:
    lease = shell.held(60, *times)
    lease.stdin.close()
    code, took = lease.end()
    assert code == RELEASED
    assert took < 3


def test_it_ends_at_once_when_its_last_holder_leaves(shell: Shell) -> None:
    lease = shell.held(60, 0, 0, 50)
    assert lease.say("left", ALICE)[1:5] == ["left", ALICE, "-", "0"]
    assert lease.end()[0] == RELEASED


def test_silence_ends_it_after_the_ttl_and_not_before(shell: Shell) -> None:
    """B13: also when nobody ever came."""
    leases = [shell(2), shell.held(2)]
    for lease in leases:
        code, took = lease.end()
        assert code == SILENCE
        assert 2 <= took < 5


def test_a_holder_keeps_it_beyond_the_ttl_and_each_renewal_is_answered(shell: Shell) -> None:
    lease = shell.held(2)
    while time.monotonic() - lease.began < 4:
        assert lease.say("keep", ALICE)[1:5] == ["keep", ALICE, ALICE, "1"]
        time.sleep(0.5)
    assert lease.process.poll() is None


@pytest.mark.parametrize("verb", ["keep", "touch"])
def test_nothing_keeps_it_beyond_its_lifetime(shell: Shell, verb: str) -> None:
    """B8: the lifetime is never extended, by a touch neither."""
    lease = shell.held(2, 3)
    assert lease.say(verb, ALICE)[-1] in {"3", "2"}
    lease.hold(ALICE, 3.5, verb)
    code, took = lease.end()
    assert code == LIFETIME
    assert 3 <= took < 5.5


def test_a_burst_of_renewals_as_after_a_pause_is_taken(shell: Shell) -> None:
    lease = shell.held(3)
    lease.stdin.write(f"keep {ALICE}\n".encode() * 500)
    lease.stdin.flush()
    for _ in range(500):
        assert lease.answer()[1] == "keep"


def test_the_time_for_which_it_was_paused_is_not_silence(shell: Shell) -> None:
    """A paused sandbox does not tick, so the holder who goes on renewing does not lose it."""
    lease = shell.held(3, 0, 5, 0)
    os.killpg(lease.process.pid, signal.SIGSTOP)
    time.sleep(6)
    os.killpg(lease.process.pid, signal.SIGCONT)
    # A shell may forget a line that is there at the moment of its timeout; others follow.
    lease.hold(ALICE, 2.5)
    assert lease.process.poll() is None


def test_the_lifetime_goes_on_while_it_is_paused(shell: Shell) -> None:
    lease = shell.held(60, 3)
    os.killpg(lease.process.pid, signal.SIGSTOP)
    time.sleep(3.5)
    os.killpg(lease.process.pid, signal.SIGCONT)
    code, took = lease.end()
    assert code == LIFETIME
    assert took < 7


# -- use ----------------------------------------------------------------------------------------


def test_it_ends_for_want_of_use_whoever_holds_it(shell: Shell) -> None:
    """B8: renewals are no use."""
    lease = shell.held(60, 0, 2)
    lease.hold(ALICE, 3.5)
    code, took = lease.end()
    assert code == IDLE
    assert 2 <= took < 5.5


def test_being_touched_keeps_it(shell: Shell) -> None:
    """B8: and what is left is told."""
    lease = shell.held(60, 0, 2)
    for _ in range(18):
        assert lease.say("touch", ALICE)[6] == "2"
        time.sleep(0.2)
    assert lease.end()[0] == IDLE


@pytest.mark.parametrize("form", ["{}000", "usage_usec {}"])
def test_use_of_the_processor_keeps_it_but_a_little_does_not(shell: Shell, form: str) -> None:
    """B8: a long computation is no idleness, with cgroups of either version."""
    used = 10**12

    def tell() -> None:
        # At once, as the kernel does it.
        new = shell.meter.with_suffix(".new")
        new.write_text(form.format(used) + "\n")
        new.rename(shell.meter)

    tell()
    lease = shell.held(60, 0, 2)
    for share, kept in ((300_000, True), (20_000, False)):
        began = last = time.monotonic()
        while lease.process.poll() is None and last - began < 4.5:
            time.sleep(0.1)
            now = time.monotonic()
            used += int((now - last) * share)
            last = now
            tell()
        assert (lease.process.poll() is None) == kept
    assert lease.end()[0] == IDLE


# -- several holders ----------------------------------------------------------------------------


def test_it_lives_until_the_last_of_its_holders_leaves(shell: Shell) -> None:
    """B7: whoever ends first does not end it for the others."""
    lease = shell.held(60)
    assert lease.say("join", BOB)[1:5] == ["join", BOB, ALICE, "2"]
    assert lease.say("join", BOB)[1:5] == ["join", BOB, ALICE, "2"]
    assert lease.say("left", ALICE)[1:5] == ["left", ALICE, BOB, "1"]
    assert lease.say("keep", ALICE)[1] == "lost"
    assert lease.say("left", BOB)[1:5] == ["left", BOB, "-", "0"]
    assert lease.end()[0] == RELEASED


def test_a_holder_that_goes_silent_is_dropped_while_others_renew(shell: Shell) -> None:
    """B7, B13: many renewals of one do not make another one younger."""
    lease = shell.held(2)
    lease.say("join", BOB)
    lease.hold(BOB, 3.5)
    deadline = time.monotonic() + 5
    while (answer := lease.say("keep", BOB))[3:5] != [BOB, "1"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert answer[3:5] == [BOB, "1"]


def test_who_takes_it_has_it_alone_until_that_one_leaves(shell: Shell) -> None:
    """Decision 7: exactly one owner at a time."""
    lease = shell.held(60, 0, 0, 60)
    assert lease.say("take", BOB)[1:5] == ["take", BOB, BOB, "1"]
    assert lease.say("keep", ALICE)[1] == "lost"
    assert lease.say("join", CAROL)[1] == "held"
    assert lease.say("left", CAROL)[1] == "lost"
    assert lease.say("take", CAROL)[1:5] == ["take", CAROL, CAROL, "1"]
    assert lease.say("keep", BOB)[1] == "lost"
    assert lease.say("park", CAROL)[1:5] == ["park", CAROL, "-", "0"]
    assert lease.say("join", BOB)[1:5] == ["join", BOB, BOB, "1"]


def test_who_took_it_and_died_does_not_keep_others_out(shell: Shell) -> None:
    lease = shell(2, grace=60)
    lease.say("take", ALICE)
    deadline = time.monotonic() + 6
    while (said := lease.say("join", BOB)[1]) == "held" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert said == "join"


def test_more_holders_than_there_is_room_for_are_turned_away(shell: Shell) -> None:
    lease = shell(60)
    answers = [lease.say("join", f"{n:x}")[1] for n in range(66)]
    assert answers == ["join"] * 64 + ["full"] * 2


def test_it_outlives_its_last_holder_for_the_grace_time(shell: Shell) -> None:
    """Decision 7: a resumable lease; the time is counted from when the holder counts as dead."""
    code, took = shell.held(2, 0, 0, 3).end(15)
    assert code == SILENCE
    assert 5 <= took < 9


def test_who_comes_within_the_grace_time_finds_it(shell: Shell) -> None:
    lease = shell.held(60, 0, 0, 10)
    lease.say("ready", ALICE)
    lease.say("park", ALICE)
    time.sleep(2)
    assert lease.say("join", BOB)[1:6] == ["join", BOB, BOB, "1", "1"]
    lease.hold(BOB, 4)
    assert lease.process.poll() is None


def test_without_a_grace_time_it_ends_also_when_it_was_parked(shell: Shell) -> None:
    lease = shell.held(60)
    lease.say("park", ALICE)
    assert lease.end()[0] == RELEASED


def test_only_a_holder_can_say_that_it_is_ready(shell: Shell) -> None:
    """B10: whether the workspace has been prepared is told to everybody."""
    lease = shell.held(60)
    assert lease.say("ready", BOB)[1:6] == ["lost", BOB, ALICE, "1", "0"]
    assert lease.say("ready", ALICE)[5] == "1"
    assert lease.say("join", BOB)[5] == "1"


def test_what_is_no_line_of_the_protocol_changes_nothing(shell: Shell) -> None:
    lease = shell.held(60)
    for line in ("", "keep", "join ../x", "join *", "$(id)", "\xff\xfe", f"eep {ALICE}", ALICE):
        lease.stdin.write(line.encode("latin-1") + b"\n")
    lease.stdin.write(b"join b0b more words\n")
    lease.stdin.flush()
    assert lease.answer()[1:5] == ["join", BOB, ALICE, "2"]


# -- its clock ----------------------------------------------------------------------------------


def test_a_clock_that_cannot_go_on_ends_it(shell: Shell) -> None:
    """RES-01: at the process limit; only a shell without a timed read needs a process."""
    lease = shell.held(40)
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
            lease.send("keep", ALICE)
        time.sleep(0.25)
    assert lease.end()[0] == NO_CLOCK


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_people_do_not_see_its_comments_in_the_process_list() -> None:
    assert not [line for line in lease_text().splitlines() if line.lstrip().startswith("#")]
    assert len(lease_text()) < 5000
