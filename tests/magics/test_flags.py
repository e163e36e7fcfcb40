"""The flags of the magics: what is ours, what is the program's, and what is a mistake."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from sandbox_magics.flags import Flag, Flags, duration, number, parse_words, size, split, variable

FLAGS = Flags(
    [
        Flag(("--out",), "store", "VAR", variable),
        Flag(("--timeout", "-t"), "bound", "SEC", duration),
        Flag(("--env", "-e"), "set", "NAME", repeat=True),
        Flag(("--quiet", "-q"), "hush, 100 %"),
        Flag(("--no-raise-error",), "do not raise"),
    ],
    usage="%sandbox_test [FLAGS] [--] PROGRAM",
    rest="PROGRAM",
    examples=["%sandbox_test -q ls"],
)
WORDS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)


def test_a_programs_own_options_are_left_alone() -> None:
    """Acceptance: `-q` and `--timeout` behind the program are the program's."""
    parsed = FLAGS.parse("-t 5m --env A=1 -eB pytest -q --timeout=3 -- -x")
    assert parsed["timeout"] == 300
    assert parsed["env"] == ("A=1", "B")
    assert parsed["quiet"] is False
    assert parsed["out"] is None
    assert parsed.rest == ("pytest", "-q", "--timeout=3", "--", "-x")


def test_two_dashes_end_the_flags() -> None:
    """Magics: `--` ends the flags, and is itself no word."""
    assert FLAGS.parse("-q -- --odd-program -q").rest == ("--odd-program", "-q")
    assert FLAGS.parse("--").rest == ()


def test_quotes_group_words_as_in_a_shell() -> None:
    """Magics: IPython's own splitting leaves the quotes in the value."""
    parsed = FLAGS.parse("""--env "A=b c" -e 'D=$x' sh -c 'echo "hi" # $HOME'""")
    assert parsed["env"] == ("A=b c", "D=$x")
    assert parsed.rest == ("sh", "-c", 'echo "hi" # $HOME')
    with pytest.raises(UsageError, match="no closing quotation"):
        FLAGS.parse("--env 'A=b")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--timeot 3 ls", "there is no flag --timeot.*--timeout"),
        ("-x ls", "there is no flag -x"),
        ("--user root ls", "there is no flag --user: code always runs as the unprivileged user"),
        ("-v /:/host ls", "there is no flag -v: no folder of the machine is mounted"),
        ("--time 3 ls", "there is no flag --time"),  # no abbreviations: they change with us
        ("--timeout", "--timeout needs a value: --timeout SEC"),
        ("-t 5x ls", "-t 5x: this is not a time"),
        ("-t -5 ls", "-t -5: this is not a time"),
        ("--out 9a ls", "--out 9a: this is not the name of a variable"),
        ("--quiet=yes ls", "--quiet takes no value"),
        ("-qt 3 ls", "there is no flag -qt"),
        ("-t 1 --timeout 2 ls", "--timeout is given twice"),
        ("--\x1b[31m ls", r"there is no flag '--\?\[31m'"),
    ],
)
def test_a_mistake_is_an_error_that_names_the_word(line: str, said: str) -> None:
    """Acceptance: a typo in a flag stops, and no program is run."""
    with pytest.raises(UsageError, match=said):
        FLAGS.parse(line)


def test_flags_may_stand_anywhere_where_no_program_follows() -> None:
    """`%sandbox_kill r1 --all` needs no order; words that are not allowed are refused."""
    kill = Flags([Flag(("--all",), "all")], usage="%k [RUN…]", rest="RUN", anywhere=True)
    parsed = kill.parse("r1 --all r2")
    assert parsed["all"]
    assert parsed.rest == ("r1", "r2")
    none = Flags([Flag(("--all",), "all")], usage="%k [--all]")
    with pytest.raises(UsageError, match=r"r1 is not understood: %k \[--all\]"):
        none.parse("r1")


@given(st.lists(WORDS, min_size=1), st.booleans())
def test_words_behind_the_program_arrive_as_they_were(words: list[str], quiet: bool) -> None:
    """Whatever they hold, and however they had to be quoted."""
    line = ("-q " if quiet else "") + shlex.join(["--", *words])
    parsed = FLAGS.parse(line)
    assert parsed.rest == tuple(words)
    assert parsed["quiet"] is quiet


@given(WORDS)
def test_any_line_is_read_or_refused(line: str) -> None:
    """Never anything but a `UsageError`."""
    with contextlib.suppress(UsageError):
        FLAGS.parse(line)


@given(WORDS)
def test_attached_and_separate_values_are_the_same(value: str) -> None:
    """`--env=V`, `--env V` and `-eV`."""
    for words in (["--env", value], [f"--env={value}"], ["-e", value]):
        assert FLAGS.parse_words(words)["env"] == (value,)
    if value and not value.startswith("="):
        assert FLAGS.parse_words([f"-e{value}"])["env"] == (value,)


def test_times_sizes_and_numbers() -> None:
    """Magics: `30`, `5m`; bytes with units."""
    assert [duration(t) for t in ("30", "0", "500ms", "1.5m", "2h", "7s")] == [
        30, 0, 0.5, 90, 7200, 7,
    ]  # fmt: skip
    for wrong in ("", "m", "-1", "1e3", "5 m", "1d", "٣", "inf", "nan"):
        with pytest.raises(ValueError, match="not a time"):
            duration(wrong)
    assert size("1.5G") == 3 << 29
    assert size("10") == 10
    with pytest.raises(ValueError, match="not an amount of memory"):
        size("10X")
    assert number("0.5") == 0.5
    with pytest.raises(ValueError, match="not a number"):
        number("a")


def test_a_cell_of_words_has_one_on_each_line() -> None:
    """`%%sandbox_run`: long commands without quotes."""
    assert parse_words("pytest\n  -k\n a or b \n\n'x'\n") == ["pytest", "-k", "a or b", "'x'"]
    assert split("a 'b c' # d") == ["a", "b c", "#", "d"]


def test_the_help_shows_every_flag_and_the_examples() -> None:
    """`%%sandbox?`: published through IPython's own magic_arguments."""

    @FLAGS.published
    def sandbox_test(line: str) -> None:
        """Run it."""

    shown = sandbox_test.__doc__ or ""
    assert "%sandbox_test [FLAGS] [--] PROGRAM" in shown
    assert "%%sandbox_test" not in shown
    for flag in FLAGS.flags:
        for name in flag.names:
            assert name in shown
    assert "hush, 100 %" in shown
    assert "Run it." in shown
    assert "  %sandbox_test -q ls" in shown


def test_flags_are_completed_where_one_can_stand() -> None:
    """Not where a value or the program's own option is due."""
    assert FLAGS.completions([], "--") == [
        "--out", "--timeout", "--env", "--quiet", "--no-raise-error",
    ]  # fmt: skip
    assert FLAGS.completions(["-q", "--timeout", "3"], "--no") == ["--no-raise-error"]
    assert FLAGS.completions(["--timeout"], "--") == []
    assert FLAGS.completions(["pytest"], "--") == []
    assert FLAGS.completions(["--"], "--") == []
    assert FLAGS.completions([], "py") == []


def test_the_page_names_every_magic_and_every_flag() -> None:
    """Issue 6: docs/magics.md is complete."""
    from pathlib import Path

    from sandbox_magics import options

    page = (Path(__file__).parent.parent.parent / "docs" / "magics.md").read_text(encoding="utf-8")
    for name in options.__all__:
        flags = getattr(options, name)
        magic = flags.usage.split()[0].lstrip("%")
        assert f"%{magic}" in page, magic
    for flag in (*options.CELL.flags, *options.RUN.flags):
        assert f"{flag.names[0]}" in page, flag.names
