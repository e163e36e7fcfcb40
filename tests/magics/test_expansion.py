"""`{name}` in the words of a command: one word each, whatever the value holds."""

from __future__ import annotations

import contextlib
import pickle
import shlex
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.error import UsageError
from sandbox_magics.expansion import expand, fill
from sandbox_magics.secret import Secret

TEXT = st.text(st.characters(blacklist_characters="\0"))


@given(TEXT)
def test_a_value_is_exactly_one_word(value: str) -> None:
    """Acceptance: a hostile `{var}` is one argument."""
    assert expand(["{v}", "x={v}.", "{v}"], {"v": value}) == [value, f"x={value}.", value]


@given(TEXT)
def test_doubled_braces_bring_any_text_through(text: str) -> None:
    """`{{` and `}}` are literals."""
    escaped = text.replace("{", "{{").replace("}", "}}")
    assert expand([escaped], {}) == [text]


@given(st.lists(TEXT))
def test_a_list_becomes_as_many_words(values: list[str]) -> None:
    """`{files...}` alone, in both ways to write it."""
    assert expand(["a", "{v...}", "b"], {"v": values}) == ["a", *values, "b"]
    assert expand(["{v…}"], {"v": iter(values)}) == values


@given(st.text())
def test_any_word_is_expanded_or_refused(word: str) -> None:
    """Never anything but an error that says what is wrong."""
    with contextlib.suppress(UsageError, NameError):
        expand([word], {"a": 1})


def test_attributes_keys_conversions_and_formats() -> None:
    """Magics: `{name!r}`, `{obj.attr}`, format specs."""
    variables = {"o": SimpleNamespace(p={"k": [1, 2.5]}), "s": "a b", "n": 3}
    assert expand(["{o.p[k][1]:.2f}", "{s!r}", "{n:03}", "$s", "{s:>5}"], variables) == [
        "2.50", "'a b'", "003", "$s", "  a b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("{missing}", NameError, "'missing' is not defined"),
        ("{missing...}", NameError, "'missing' is not defined"),
        ("{print $1}", UsageError, r"write \{\{print \$1\}\}"),
        ("{}", UsageError, r"write \{\{\}\}"),
        ("{", UsageError, r"write \{\{"),
        ("a}", UsageError, r"write \}\}"),
        ("{s...}", UsageError, "this is str, and a list is needed"),
        ("x{l...}", UsageError, "a word of its own"),
        ("{b}", UsageError, "--in b"),
        ("{nul}", UsageError, "NUL"),
        ("{secret}", UsageError, "-e secret"),
        ("{secret!r}", UsageError, "-e secret"),
        ("{o.__class__.nothing}", AttributeError, "nothing"),
    ],
)
def test_what_cannot_be_expanded_is_an_error(word: str, error: type[Exception], said: str) -> None:
    """An undefined name is named; IPython would pass the text on."""
    variables = {
        "s": "text", "l": ["a"], "b": b"x", "nul": "a\0b", "o": object(),
        "secret": Secret("correct horse"),
    }  # fmt: skip
    with pytest.raises(error, match=said) as caught:
        expand([word], variables)
    assert "correct horse" not in str(caught.value)


def test_a_secret_shows_nowhere() -> None:
    """Magics, variables, 4."""
    secret = Secret("correct horse")
    assert "correct" not in f"{secret} {secret!r} {[secret]}"
    assert secret.reveal() == "correct horse"
    assert secret == Secret("correct horse") != Secret("other one")
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(secret)
    with pytest.raises(ValueError, match="4 characters"):
        Secret("abc")


@given(TEXT, st.text(st.characters(blacklist_characters="{}\0")))
def test_a_value_in_a_script_is_one_word_of_it(value: str, around: str) -> None:
    """Variables, 2: `--template` quotes; a shell reads the value back as it is."""
    filled = fill(f"{around}{{{{ v }}}}", {"v": value})
    assert filled.startswith(around)
    assert shlex.split(filled[len(around) :]) == [value]


def test_a_template_leaves_all_else_alone() -> None:
    """Variables, 2: single braces are the script's; raw is not quoted; a slip is an error."""
    text = "echo ${x} {a,b} '{\"k\": 1}' | awk '{print $1}'; ls {{flags|raw}} {{n:03}}"
    assert fill(text, {"flags": "-l -a", "n": 7}) == text.replace("{{flags|raw}}", "-l -a").replace(
        "{{n:03}}", "007"
    )
    with pytest.raises(NameError, match="missing"):
        fill("{{missing}}", {})
    with pytest.raises(UsageError, match="not a variable"):
        fill("{{1 + 1}}", {})
    with pytest.raises(UsageError, match="-e secret"):
        fill("{{secret|raw}}", {"secret": Secret("correct horse")})
