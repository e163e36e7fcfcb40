"""The courier's own steps, with a tree that changes at one exact moment (F1, F2, F3).

The courier runs here, on a folder of the test. In place of the connection it gets a host that
keeps what is sent, and that changes the tree right after a certain frame: what code in a sandbox
manages once in many thousand tries happens each time. What was sent then goes to the product's
own receiver, as it would arrive.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.process.files import wire
from sandbox_kernel.process.files.incoming import Listing, Receiver
from sandbox_kernel.process.files.rules import Globs
from tests.process.test_files_incoming import HELLO, LIMITS, NONCE, Side

Change = Callable[[], object]
BOUNDS = {
    "entries": LIMITS.entries,
    "file_size": LIMITS.file_size,
    "total_size": LIMITS.total_size,
}


@pytest.fixture(scope="module")
def courier() -> Any:
    """The courier as a module: as a program it serves its stdin at once."""
    text = resources.files("sandbox_kernel.process.files").joinpath("courier.py").read_text("utf-8")
    assert text.endswith("\n\nmain()\n")
    module = types.ModuleType("courier")
    exec(compile(text.removesuffix("main()\n"), "courier.py", "exec"), module.__dict__)
    return module


class Host:
    """Keeps what is sent; `changes` are made right after the frame of a kind about a path."""

    def __init__(self, changes: dict[tuple[int, str], Change]) -> None:
        self.sent = bytearray(HELLO)
        self.changes = dict(changes)

    def send(self, data: bytes) -> None:
        self.sent += data
        for kind, payload in wire.Decoder().feed(data):
            path = None
            if kind == wire.ENTRY:
                path = wire.decode_entry(bytes(payload)).path
            elif kind == wire.SKIPPED:
                path = wire.decode_why(bytes(payload)).path
            change = None if path is None else self.changes.pop((kind, os.fsdecode(path)), None)
            if change is not None:
                change()

    def send_from(self, fd: int, most: int) -> int:
        data = os.read(fd, most)
        if data:
            self.send(wire.encode(wire.DATA, data))
        return len(data)


class Tree:
    """A tree in which a folder can become a link to elsewhere, and a folder again."""

    def __init__(self, base: Path) -> None:
        self.root = base / "inside"
        self.aside = base / "aside"
        (base / "elsewhere").mkdir()
        (base / "elsewhere" / "x.txt").write_text("secret")
        for path in ("a/x.txt", "a/b/y.txt", "a/b/c/z.txt", "d/w.txt"):
            file = self.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(path)

    def hide(self, path: str) -> None:
        (self.root / path).rename(self.aside)
        (self.root / path).symlink_to(self.root.parent / "elsewhere")

    def show(self, path: str) -> None:
        (self.root / path).unlink()
        self.aside.rename(self.root / path)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def order(of: Tree, **more: Any) -> dict[str, Any]:
    return {"root": str(of.root), "parts": [], "limits": BOUNDS, "windows": False, **more}


def received(host: Host, base: Path, globs: Globs | None = None) -> tuple[Side, dict[str, str]]:
    """Hand what was sent to the receiver; return what landed, and what was left out and why."""
    (base / "host").mkdir()
    side = Side(base / "host", globs=globs)
    side.take(bytes(host.sent))
    assert side.receiver.finished
    return side, {one.path: one.reason for one in side.receiver.skipped}


ENTRY, SKIPPED = wire.ENTRY, wire.SKIPPED


@pytest.mark.parametrize(
    ("hidden", "at", "lost"),
    [
        # Its own turn comes right after that of the entry before it, and its files' after that.
        ("a", "", {"a", "a/b", "a/b/c", "a/b/c/z.txt", "a/b/y.txt", "a/x.txt"}),
        ("a/b", "a", {"a/b", "a/b/c", "a/b/c/z.txt", "a/b/y.txt"}),
        ("a/b/c", "a/b", {"a/b/c", "a/b/c/z.txt"}),
        ("d", "a/x.txt", {"d", "d/w.txt"}),
    ],
)
@pytest.mark.parametrize("pattern", [None, "**/*.txt"])
def test_a_folder_that_was_a_link_when_its_turn_came_is_left_out_with_all_in_it(
    courier: Any, tree: Tree, tmp_path: Path, hidden: str, at: str, lost: set[str],
    pattern: str | None,
) -> None:  # fmt: skip
    """F2, F3: without its folder a file has no place; the rest of the tree arrives."""
    host = Host({
        (ENTRY, at): lambda: tree.hide(hidden),
        (SKIPPED, hidden): lambda: tree.show(hidden),
    })  # fmt: skip
    if pattern is None:
        courier.give(host, order(tree, tree=True))
        side, skipped = received(host, tmp_path)
    else:
        courier.collect(host, order(tree, patterns=[pattern]))
        side, skipped = received(host, tmp_path, Globs([pattern], whole=True))
    assert not host.changes
    assert set(skipped) == lost
    assert skipped[hidden] == "link"
    everything = {str(path.relative_to(tree.root)) for path in tree.root.rglob("*")}
    landed = {path.removeprefix("target/"): data for path, data in side.found().items()}
    assert set(landed) - {"target"} == everything - lost
    assert all(data is None or data.decode() == path for path, data in landed.items())


def test_a_folder_that_becomes_a_link_after_its_turn_lets_out_nothing_of_elsewhere(
    courier: Any, tree: Tree, tmp_path: Path
) -> None:
    """F2: a folder that is held open is read on; what has to be opened anew is not found."""
    host = Host({(ENTRY, "a"): lambda: tree.hide("a")})
    courier.give(host, order(tree, tree=True))
    side, _ = received(host, tmp_path)
    assert b"secret" not in host.sent
    assert side.found()["target/d/w.txt"] == b"d/w.txt"


def test_a_file_that_becomes_a_link_when_its_turn_comes_is_left_out(
    courier: Any, tree: Tree, tmp_path: Path
) -> None:
    """F2."""
    host = Host({(ENTRY, "d"): lambda: tree.hide("d/w.txt")})
    courier.give(host, order(tree, tree=True))
    side, skipped = received(host, tmp_path)
    assert skipped == {"d/w.txt": "link"}
    assert "target/d/w.txt" not in side.found()


def listed(host: Host) -> list[str]:
    listing = Listing("/inside", LIMITS.entries, windows=False)
    receiver = Receiver(NONCE, listing, LIMITS.entries)
    receiver.feed(bytes(host.sent))
    assert receiver.finished
    return [entry.path.removeprefix("/inside/") for entry in listing.entries]


def show(courier: Any, tree: Tree, changes: dict[tuple[int, str], Change]) -> list[str]:
    host = Host(changes)
    courier.show(host, order(tree, pattern="", recursive=True))
    assert not host.changes
    return sorted(listed(host))


def test_a_listing_goes_on_beside_a_folder_that_becomes_a_link(courier: Any, tree: Tree) -> None:
    """F2: it is listed as what it was, and nothing of elsewhere is."""
    changes: dict[tuple[int, str], Change] = {(ENTRY, "a/b"): lambda: tree.hide("a/b")}
    assert show(courier, tree, changes) == ["a", "a/b", "a/x.txt", "d", "d/w.txt"]


def test_a_listing_goes_on_beside_a_folder_that_cannot_be_looked_into(
    courier: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: its names may be read, and nothing else; root, as whom tests may run, always can."""
    find = courier.Folder.find

    def refuse(self: Any, name: str) -> Any:
        if name == "y.txt":
            raise PermissionError(13, "Permission denied", name)
        return find(self, name)

    monkeypatch.setattr(courier.Folder, "find", refuse)
    found = show(courier, tree, {})
    assert {"a", "a/b", "a/x.txt", "d", "d/w.txt"} <= set(found)


def test_what_has_no_end_in_depth_is_refused_with_its_place(courier: Any, tmp_path: Path) -> None:
    """TAR-10."""
    tree = Tree(tmp_path)
    place = tree.root
    for _ in range(courier.MAX_PARTS + 1):
        place /= "n"
        place.mkdir()
    with pytest.raises(courier.TroubleError) as caught:
        courier.give(Host({}), order(tree, tree=True))
    assert caught.value.code == courier.TOO_DEEP
    assert caught.value.path.endswith("/n/n/n")
