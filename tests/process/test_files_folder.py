"""Folders held open, and what is prepared aside in them: on a disk, without a sandbox."""

from __future__ import annotations

import ctypes
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_kernel.process.files import trouble as codes
from sandbox_kernel.process.files.folder import (
    STAGE_PREFIX,
    Chain,
    Folder,
    Stage,
    remove_tree,
    settled,
    version,
)
from sandbox_kernel.process.files.trouble import TroubleError

_EXCHANGE = 2
_AT_FDCWD = -100


@pytest.fixture(params=["held", "by path"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    """A folder that is held open, and one on a platform that cannot do that."""
    with Folder.open(str(tmp_path), False, held=request.param == "held") as opened:
        yield opened


def code_of(work: Callable[[], object]) -> tuple[int, str]:
    with pytest.raises(TroubleError) as caught:
        work()
    return caught.value.code, caught.value.path


def write(stage: Stage, parts: list[str], data: bytes, mode: int = 0o644) -> None:
    fd = stage.new_file(parts, mode)
    os.write(fd, data)
    os.close(fd)


# -- folders ----------------------------------------------------------------------------------


def test_nothing_is_reached_through_a_link(folder: Folder, tmp_path: Path) -> None:
    """F2, TAR-01, TAR-16: not as the last part, nor as one on the way."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "out").symlink_to("/etc/passwd")
    chain = Chain(folder)
    assert code_of(lambda: chain.at(["link"])) == (codes.IS_LINK, "link")
    assert code_of(lambda: chain.at(["loop", "x"])) == (codes.IS_LINK, "loop")
    assert code_of(lambda: chain.at(["real", "file"])) == (codes.NOT_FOLDER, "real/file")
    assert code_of(lambda: chain.at(["real", "no", "x"])) == (codes.NOT_FOUND, "real/no")
    assert code_of(lambda: folder.read_file("out"))[0] == codes.IS_LINK
    assert code_of(lambda: folder.read_file("real"))[0] == codes.IS_FOLDER
    chain.close()


def test_a_fifo_or_a_device_is_refused_at_once(folder: Folder, tmp_path: Path) -> None:
    """F2, TAR-04: opening it would wait for a writer for ever."""
    os.mkfifo(tmp_path / "fifo")
    assert code_of(lambda: folder.read_file("fifo"))[0] == codes.NOT_REGULAR
    with Folder.open("/dev", False) as devices:
        assert code_of(lambda: devices.read_file("zero"))[0] == codes.NOT_REGULAR


def test_a_chain_keeps_open_what_the_next_path_shares(folder: Folder, tmp_path: Path) -> None:
    """F1: a tree of many files costs one open folder for each."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "c").mkdir()
    chain = Chain(folder)
    first = chain.at(["a", "b"])
    assert chain.at(["a", "b"]) is first
    chain.at(["a", "c"])
    assert chain.at([]) is folder
    chain.at(["a", "new", "newer"], make=True)
    assert (tmp_path / "a" / "new" / "newer").is_dir()
    chain.close()


def exchange(one: Path, other: Path) -> None:
    """Let two names change places in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _EXCHANGE)
    if libc.renameat2(*arguments):
        raise OSError(ctypes.get_errno(), "renameat2")


def test_a_folder_that_changes_places_with_a_link_gives_its_own_files_only(tmp_path: Path) -> None:
    """TAR-08: 2,000 tries against a loop of exchanges; the engine's own way failed 48 of 63."""
    (tmp_path / "r" / "cur").mkdir(parents=True)
    (tmp_path / "r" / "cur" / "hostname").write_text("mine")
    (tmp_path / "r" / "l").symlink_to("/etc")
    done = threading.Event()
    turns = 0

    def swap() -> None:
        nonlocal turns
        while not done.is_set():
            exchange(tmp_path / "r" / "cur", tmp_path / "r" / "l")
            turns += 1

    thread = threading.Thread(target=swap)
    thread.start()
    given = 0
    seen: set[int] = set()
    try:
        with Folder.open(str(tmp_path), False) as base:
            for _ in range(2000):
                chain = Chain(base)
                try:
                    fd = chain.at(["r", "cur"]).read_file("hostname")
                except TroubleError as trouble:
                    seen.add(trouble.code)
                else:
                    assert os.read(fd, 100) == b"mine"
                    os.close(fd)
                    given += 1
                finally:
                    chain.close()
    finally:
        done.set()
        thread.join()
    assert given
    assert turns
    assert seen <= {codes.IS_LINK, codes.NOT_FOLDER}


def test_removing_a_tree_follows_no_link(folder: Folder, tmp_path: Path) -> None:
    """F2, F4."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "link").symlink_to(outside)
    os.mkfifo(tmp_path / "tree" / "fifo")
    remove_tree(folder, "tree")
    assert not (tmp_path / "tree").exists()
    assert (outside / "kept").exists()


# -- stages -----------------------------------------------------------------------------------


def test_what_is_prepared_shows_in_its_place_only_when_it_is_placed(
    folder: Folder, tmp_path: Path
) -> None:
    """F1: whole or not there at all."""
    stage = Stage(folder)
    write(stage, [], b"new")
    assert not (tmp_path / "file").exists()
    assert folder.names() == []
    stage.place(folder, "file", overwrite=False)
    stage.remove()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_tree_is_placed_in_one_step_and_merged_with_one_that_is_there(
    folder: Folder, tmp_path: Path
) -> None:
    """F1: what only the old one has stays."""
    for number, data in enumerate((b"one", b"two")):
        stage = Stage(folder)
        stage.make_folder([], 0o755)
        stage.make_folder(["sub"], 0o755)
        write(stage, ["sub", "same"], data)
        write(stage, ["sub", str(number)], data)
        stage.place(folder, "tree", overwrite=True)
        stage.remove()
    sub = tmp_path / "tree" / "sub"
    assert {p.name: p.read_bytes() for p in sub.iterdir()} == {
        "same": b"two",
        "0": b"one",
        "1": b"two",
    }


@pytest.mark.parametrize(
    ("there", "overwrite", "expected"),
    [
        ("file", False, (codes.EXISTS, "sub/x")),
        ("link", False, (codes.EXISTS, "sub/x")),
        ("folder", True, (codes.IS_FOLDER, "sub/x")),
        ("folder", False, (codes.IS_FOLDER, "sub/x")),
    ],
)
def test_a_conflict_anywhere_leaves_everything_as_it_was(
    folder: Folder, tmp_path: Path, there: str, overwrite: bool, expected: tuple[int, str]
) -> None:
    """F1: it is looked for before anything is moved."""
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    if there == "file":
        (tmp_path / "tree" / "sub" / "x").write_text("old")
    elif there == "link":
        (tmp_path / "tree" / "sub" / "x").symlink_to("nowhere")
    else:
        (tmp_path / "tree" / "sub" / "x").mkdir()
    stage = Stage(folder)
    stage.make_folder([], 0o755)
    write(stage, ["a"], b"new")
    stage.make_folder(["sub"], 0o755)
    write(stage, ["sub", "x"], b"new")
    assert code_of(lambda: stage.place(folder, "tree", overwrite)) == expected
    stage.remove()
    assert sorted(os.listdir(tmp_path / "tree")) == ["sub"]
    assert os.listdir(tmp_path) == ["tree"]


def test_a_folder_does_not_take_the_place_of_a_file_nor_of_a_link(
    folder: Folder, tmp_path: Path
) -> None:
    """F2: in particular not what a link leads to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(outside)
    for name in ("file", "link"):
        stage = Stage(folder)
        stage.make_folder([], 0o755)
        write(stage, ["planted"], b"x")
        assert code_of(lambda stage=stage, name=name: stage.place(folder, name, True)) == (
            codes.NOT_FOLDER,
            "",
        )
        stage.remove()
    assert os.listdir(outside) == []


def test_a_file_takes_the_place_of_a_link_and_not_of_what_it_leads_to(
    folder: Folder, tmp_path: Path
) -> None:
    """F2."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "name").symlink_to(victim)
    stage = Stage(folder)
    write(stage, [], b"new")
    stage.place(folder, "name", overwrite=True)
    stage.remove()
    assert victim.read_text() == "kept"
    assert not (tmp_path / "name").is_symlink()


def test_a_file_that_appears_at_the_last_moment_is_not_replaced(tmp_path: Path) -> None:
    """F1: without ``overwrite`` the last step itself refuses."""
    with Folder.open(str(tmp_path), False) as folder:
        stage = Stage(folder)
        write(stage, [], b"new")
        (tmp_path / "name").write_text("theirs")
        with pytest.raises(FileExistsError):
            stage._folder.move("item", folder, "name", overwrite=False)
        stage.remove()
    assert (tmp_path / "name").read_text() == "theirs"


def test_a_stage_that_a_killed_process_left_is_removed_and_one_in_use_is_not(
    tmp_path: Path,
) -> None:
    """F1: nothing half written stays for ever, not even after SIGKILL."""
    with Folder.open(str(tmp_path), False) as folder:
        left = tmp_path / f"{STAGE_PREFIX}0123456789abcdef"
        (left / "item").mkdir(parents=True)
        (left / "item" / "half").write_text("x" * 1000)
        used = Stage(folder)
        assert not left.exists()
        write(used, [], b"mine")
        other = Stage(folder)
        other.remove()
        used.place(folder, "file", overwrite=True)
        used.remove()
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_planted_stage_is_no_way_out(tmp_path: Path) -> None:
    """F2: a link with a stage's name is not followed, neither to lock nor to remove."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    base = tmp_path / "base"
    base.mkdir()
    (base / f"{STAGE_PREFIX}planted").symlink_to(outside)
    os.mkfifo(base / f"{STAGE_PREFIX}fifo")
    with Folder.open(str(base), False) as folder:
        Stage(folder).remove()
    assert (outside / "kept").exists()


def test_merging_while_a_folder_becomes_a_link_never_writes_through_it(tmp_path: Path) -> None:
    """F2: 300 merges against a loop that exchanges a folder of the target with a link out."""
    outside = tmp_path / "outside"
    target = tmp_path / "target"
    (target / "sub").mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "target" / "evil").symlink_to(outside)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            exchange(target / "sub", target / "evil")

    thread = threading.Thread(target=swap)
    thread.start()
    placed = 0
    seen: set[int] = set()
    try:
        with Folder.open(str(tmp_path), False) as folder:
            for number in range(300):
                stage = Stage(folder)
                stage.make_folder([], 0o755)
                stage.make_folder(["sub"], 0o755)
                write(stage, ["sub", str(number)], b"x")
                try:
                    stage.place(folder, "target", overwrite=True)
                    placed += 1
                except TroubleError as trouble:
                    seen.add(trouble.code)
                finally:
                    stage.remove()
    finally:
        done.set()
        thread.join()
    assert placed
    assert seen <= {codes.IS_LINK, codes.NOT_FOLDER, codes.NOT_EMPTY}
    assert os.listdir(outside) == []


def test_a_change_within_the_same_tick_of_the_clock_is_not_missed(tmp_path: Path) -> None:
    """TAR-07: what was settled and has the same version afterwards was not written meanwhile."""
    path = tmp_path / "file"
    path.write_bytes(b"0")
    fd = os.open(path, os.O_RDWR)
    try:
        for number in range(30):
            os.pwrite(fd, b"%d" % (number % 10), 0)
            found, fresh = settled(fd)
            assert not fresh
            os.pwrite(fd, b"x", 0)
            assert version(os.fstat(fd)) != version(found)
    finally:
        os.close(fd)


def test_a_file_that_is_written_all_the_time_is_never_settled(tmp_path: Path) -> None:
    """TAR-07."""
    path = tmp_path / "file"
    stop, up = threading.Event(), threading.Event()

    def write_on() -> None:
        with path.open("w") as file:
            while not stop.is_set():
                file.write("y")
                file.flush()
                up.set()

    thread = threading.Thread(target=write_on)
    thread.start()
    try:
        assert up.wait(30)
        fd = os.open(path, os.O_RDONLY)
        deadline = time.monotonic() + 30
        while not settled(fd)[1]:
            assert time.monotonic() < deadline
        os.close(fd)
    finally:
        stop.set()
        thread.join()


def test_the_mode_of_a_new_file_is_not_wider_than_asked(folder: Folder, tmp_path: Path) -> None:
    """TAR-13."""
    before = os.umask(0o077)
    try:
        os.close(folder.new_file("private", 0o644))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
