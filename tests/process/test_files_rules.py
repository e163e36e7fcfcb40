"""Which names, paths and patterns may be: pure rules, checked over everything that can be."""

from __future__ import annotations

import fnmatch
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.files.places import ROOTS, patterns_of, place_of
from sandbox_kernel.process.files.result import Skipped, TransferLimits, printable
from sandbox_kernel.process.files.rules import Globs, folded, is_safe_name, safe_mode

tricky = st.text(
    st.one_of(st.sampled_from("/.\\:\0\n\x1b\x85\u202e~ *?[]aAéßİ"), st.characters(codec="utf-16")),
    max_size=12,
)


@given(tricky, st.booleans())
def test_a_safe_name_is_one_part_of_a_path_and_shows_as_one_line(name: str, windows: bool) -> None:
    """TAR-02, F3."""
    if is_safe_name(name, windows):
        assert name not in {"", ".", ".."}
        assert not set(name) & set("/\\\0\n\r\x1b\x9b\x7f")
        assert len(name.encode("utf-8", "surrogateescape")) <= 255
        assert name[1:2] != ":"


NOWHERE = [
    "",
    ".",
    "..",
    "a/b",
    "/abs",
    "..\\x",
    "a\\b",
    "C:x",
    "c:",
    "a\0",
    "a\nb",
    "\x1b[2J",
    "\x9b0m",
]
TOO_LONG = ["x" * 256, "\u00e9" * 128]
DEVICES = [
    "CON",
    "con",
    "nul.txt",
    "NUL.tar.gz",
    "com1",
    "LPT9.log",
    "COM\u00b9",
    "aux .c",
    "conin$",
]
UNSTORABLE = [
    "ab:c",
    "12:30",
    "what?",
    "a*",
    'a"b',
    "a<b",
    "a>b",
    "a|b",
    "dot.",
    "space ",
    "\udc80",
]
ESCAPES = ["..", "a/..", "a/../b", "/workspace/../etc", "/", "/etc/passwd", "/home", "/home/sbxx"]
OTHERS = [
    "/tmpx",
    "/proc/self/mem",
    "/workspaces/a",
    "a\0b",
    "x" * 256,
    "/".join("a" * 3000),
    "/run/x",
]


@pytest.mark.parametrize("name", [*NOWHERE, *TOO_LONG])
def test_names_that_mean_something_else_are_refused_everywhere(name: str) -> None:
    """TAR-02: also where they would do no harm, since what was fetched may be carried on."""
    assert not is_safe_name(name, False)
    assert not is_safe_name(name, True)


@pytest.mark.parametrize("name", [*DEVICES, *UNSTORABLE])
def test_names_that_windows_keeps_or_cannot_store_are_refused_there_only(name: str) -> None:
    """F3, TAR-02."""
    assert not is_safe_name(name, True)
    assert is_safe_name(name, False)


@pytest.mark.parametrize(
    "name", ["a", ".hidden", "...x", "x" * 255, "ünïcödé", "a b", "console", "com10", "nul-x", "~"]
)
def test_ordinary_names_are_safe_everywhere(name: str) -> None:
    assert is_safe_name(name, False)
    assert is_safe_name(name, True)


def test_names_that_some_file_systems_take_for_one_are_folded_to_one() -> None:
    """F3: case, and composed and decomposed accents."""
    assert folded("README") == folded("readme") == folded("ReadMe")
    assert folded("\u00e9") == folded("e\u0301") == folded("\u00c9")
    assert folded("stra\u00dfe") == folded("STRASSE")
    assert folded("a") != folded("b")


@given(st.integers(0, 0o7777), st.booleans())
def test_no_mode_has_more_than_its_owner_needs(mode: int, is_folder: bool) -> None:
    """TAR-04, TAR-13: no set-id or sticky bit, nothing writable by others."""
    safe = safe_mode(mode, is_folder)
    assert not safe & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWGRP | stat.S_IWOTH)
    assert safe & 0o600 == 0o600
    assert safe & ~mode & 0o777 & ~0o700 == 0
    if is_folder:
        assert safe & 0o700 == 0o700


# -- places -----------------------------------------------------------------------------------


def place(path: str) -> str:
    found = place_of(path, "target", "/workspace", ROOTS)
    return found.path + ("/" if found.into else "")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a", "/workspace/a"),
        ("./a//b/", "/workspace/a/b/"),
        ("", "/workspace/"),
        (".", "/workspace/"),
        ("/workspace", "/workspace"),
        ("/workspace/a", "/workspace/a"),
        ("//workspace/./a/.", "/workspace/a/"),
        ("/output/x", "/output/x"),
        ("/tmp/x", "/tmp/x"),
        ("/home/sbx/.cache", "/home/sbx/.cache"),
        ("a...b", "/workspace/a...b"),
        ("tmp/x", "/workspace/tmp/x"),
    ],
)
def test_a_path_means_a_place_below_a_root(path: str, expected: str) -> None:
    """F2: relative ones lie in the workspace."""
    assert place(path) == expected


@pytest.mark.parametrize("path", [*ESCAPES, *OTHERS])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    """F2, TAR-02: the error names the setting."""
    with pytest.raises(SandboxSpecRejectedError, match="target"):
        place(path)


@given(tricky)
def test_no_path_ever_leaves_the_roots(path: str) -> None:
    """F2: by construction and by any text."""
    try:
        found = place_of(path, "target", "/workspace", ROOTS)
    except SandboxSpecRejectedError:
        return
    assert found.root in ROOTS
    assert not set(found.parts) & {"", ".", ".."}
    assert "\0" not in found.path
    assert not any("/" in part for part in found.parts)


# -- patterns ---------------------------------------------------------------------------------


def matches(pattern: str, path: str, whole: bool = False) -> bool:
    globs = Globs([pattern], whole)
    states = globs.start
    for part in path.split("/"):
        states = globs.step(states, part)
    return bool(globs.matched(states))


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("report.json", ["report.json"], ["Report.json", "a/report.json"]),
        ("*.png", ["a.png", ".png"], ["a/b.png", "a.jpg"]),
        ("*/x", ["a/x"], ["x", "a/b/x"]),
        ("**/*.csv", ["a.csv", "a/b.csv", "a/b/c.csv"], ["a.txt", "a.csv/b"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["z", "b/z", "a/b"]),
        ("a/**", ["a", "a/b", "a/b/c"], ["b"]),
        ("./a//b", ["a/b"], ["a"]),
        ("[ab]?", ["ax", "b1"], ["c1", "a"]),
    ],
)
def test_patterns_match_part_by_part(pattern: str, yes: list[str], no: list[str]) -> None:
    """F3."""
    for path in yes:
        assert matches(pattern, path), path
    for path in no:
        assert not matches(pattern, path), path


def test_a_folder_that_matches_brings_its_content_where_that_is_asked_for() -> None:
    """F3: the artifact ``coverage`` is all of it."""
    assert matches("coverage", "coverage/html/index.html", whole=True)
    assert not matches("coverage", "coverage/html/index.html", whole=False)
    assert not matches("coverage", "other/coverage", whole=True)


part = st.sampled_from(["a", "b", "ab", "*", "?", "a*", "[ab]", "**"])
name = st.sampled_from(["a", "b", "ab", "ba"])


def simply(pattern: list[str], path: list[str]) -> bool:
    """Match by trying everything, to compare with."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return simply(pattern[1:], path) or (bool(path) and simply(pattern, path[1:]))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and simply(pattern[1:], path[1:])


@given(st.lists(part, min_size=1, max_size=5), st.lists(name, min_size=1, max_size=5))
def test_patterns_match_as_trying_everything_does(pattern: list[str], path: list[str]) -> None:
    assert matches("/".join(pattern), "/".join(path)) == simply(pattern, path)


@pytest.mark.parametrize("pattern", ["", "/abs", "../x", "a/../b", "a\0", "a/" * 300])
def test_patterns_that_lead_out_are_refused(pattern: str) -> None:
    """F3: absolute paths and ``..``."""
    with pytest.raises(SandboxSpecRejectedError, match="patterns"):
        patterns_of([pattern], "patterns")
    with pytest.raises(SandboxSpecRejectedError):
        patterns_of([], "patterns")


# -- values -----------------------------------------------------------------------------------


def test_limits_must_be_positive_numbers() -> None:
    for wrong in ({"entries": 0}, {"file_size": -1}, {"seconds": 0.0}, {"total_size": 1.5}):
        with pytest.raises(SandboxSpecRejectedError, match="limits"):
            TransferLimits(**wrong)  # type: ignore[arg-type]


@given(st.text())
def test_what_is_shown_of_a_sandbox_changes_no_display(text: str) -> None:
    """KMS-13: names with bidirectional or zero-width characters are shown escaped."""
    assert printable(text).isprintable()
    assert printable("caf\u00e9 \u202egpj.exe") == "caf\u00e9 \\u202egpj.exe"
    assert "\n" not in str(Skipped("a\nb", "name"))
