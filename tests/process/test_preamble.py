"""What the wrapper reads before it starts a command: framed exactly, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.process.preamble import LONGEST, MARKER, check, frame, preamble

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)


def unframe(data: bytes) -> list[str]:
    """Read values as a shell does, which counts lines and nothing else."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    assert lines.pop() == ""
    values = []
    while lines:
        count = int(lines.pop(0))
        values.append("\n".join(lines[:count]))
        del lines[:count]
    return values


@given(st.lists(TEXT, max_size=8))
def test_values_of_any_content_are_told_apart(values: list[str]) -> None:
    """W1, C1."""
    assert unframe(frame(values)) == values


def test_a_preamble_holds_everything_in_the_wrappers_order() -> None:
    """W2."""
    for stay in (False, True):
        sent = preamble("n0", "m0", ["a", "b\nc", ""], {"X": "1\n2"}, "/dir", stay=stay)
        assert unframe(sent) == [
            *("n0", "/dir", "stay" if stay else "", "2", "X=1\n2", f"{MARKER}=m0"),
            *("3", "a", "b\nc", ""),
        ]


@pytest.mark.parametrize(
    ("argv", "env", "cwd", "setting"),
    [
        ([], {}, "/", "argv"),
        ([""], {}, "/", "argv"),
        (["a\0b"], {}, "/", "argv"),
        (["a", "\ud800"], {}, "/", "argv"),
        (["a", "x" * (LONGEST + 1)], {}, "/", "argv"),
        (["a"], {"A": "s3cret\0"}, "/", "env"),
        (["a"], {"A": "s3cret" + "x" * LONGEST}, "/", "env"),
        (["a"], {"a b": "s3cret"}, "/", "env"),
        (["a"], {"1A": "s3cret"}, "/", "env"),
        (["a"], {"": "s3cret"}, "/", "env"),
        (["a"], {"A\n": "s3cret"}, "/", "env"),
        (["a"], {"PPID": "s3cret"}, "/", "env"),
        (["a"], {MARKER: "s3cret"}, "/", "env"),
        (["a"], {}, "/a\0", "cwd"),
    ],
)
def test_what_no_wrapper_could_pass_on_is_refused_by_name(
    argv: list[str], env: dict[str, str], cwd: str, setting: str
) -> None:
    """W3: before anything runs, and without the value of a variable."""
    with pytest.raises(SandboxSpecRejectedError) as raised:
        check(argv, env, cwd)
    assert raised.value.setting == setting
    assert "s3cret" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_the_longest_argument_that_a_kernel_takes_is_taken() -> None:
    """C1."""
    check(["a", "x" * LONGEST], {}, "/")
