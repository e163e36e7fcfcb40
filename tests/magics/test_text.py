"""From bytes to shown text: nothing lost, nothing that can change a terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_magics.text import Cleaner, Decoder, Masker, clean

# Characters of which the sequences are made, far more often than chance would have it.
HOSTILE = st.text(st.sampled_from("\x1b[]0;31mK\x07\x9b\x9d\x9c\x90P\\(B\r\n\x00\x08a é"))


def fed(tool: Any, pieces: Sequence[Any], empty: Any) -> Any:
    return empty.join([*(tool.feed(piece) for piece in pieces), tool.rest()])


def cut(whole: Any, places: list[int]) -> list[Any]:
    bounds = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(bounds)]


CUTS = st.lists(st.integers(0, 1 << 16))


@given(st.text() | HOSTILE, CUTS)
def test_split_characters_are_whole(text: str, places: list[int]) -> None:
    """Acceptance, peers 13: UTF-8 split anywhere."""
    data = text.encode("utf-8", "replace")
    assert fed(Decoder(), cut(data, places), "") == data.decode()


@given(st.binary(), CUTS)
def test_what_is_no_text_loses_nothing_after_it(data: bytes, places: list[int]) -> None:
    """IPython's `%%bash` ends for good at such a byte."""
    shown = fed(Decoder(), [*cut(data, places), b"\nend"], "")
    assert shown == (data + b"\nend").decode("utf-8", "replace")
    assert shown.endswith("\nend")


@given(HOSTILE | st.text(), CUTS)
def test_only_colours_line_ends_and_tabs_get_through(text: str, places: list[int]) -> None:
    """KMS-11: no control character but `\\n`, `\\t`, `\\r`, and those of a colour."""
    shown = fed(Cleaner(), cut(text, places), "")
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", shown)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", rest)


@given(st.text(st.characters(blacklist_categories=["Cc"], whitelist_characters="\n\t")), CUTS)
def test_plain_text_passes_unchanged(text: str, places: list[int]) -> None:
    """Not a character is lost."""
    assert fed(Cleaner(), cut(text, places), "") == text


SHORT = st.sampled_from(
    ["\x1b[1;31m", "\x1b[2K", "\x1b]0;t\x07", "\x1b(B", "\r\n", "\r", "x\n", "é", "\x00", "\x1bc"]
)


@given(st.lists(SHORT), CUTS)
def test_where_the_pieces_were_cut_makes_no_difference(parts: list[str], places: list[int]) -> None:
    """Sequences that programs write."""
    text = "".join(parts)
    assert fed(Cleaner(), cut(text, places), "") == clean(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10%\r20%\r\n", "10%\r20%\n"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("\x9b31mred", "\x1b[31mred"),
        ("a\x1b[2J\x1b[1;1Hb", "ab"),
        ("a\x1b]52;c;cm0gLXJm\x07b", "ab"),
        ("a\x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1bP+q544e\x1b\\b", "ab"),
        ("a\x1b]0;never ends\nnext line", "a\nnext line"),
        ("nul\x00 bell\x07 back\x08", "nul bell back"),
        ("\x1bc\x1b(B\x1b7ok", "ok"),
        ("end\x1b", "end"),
    ],
)
def test_sequences_of_terminals(text: str, shown: str) -> None:
    """Acceptance: `\\r` bars, NUL and ESC bytes."""
    assert clean(text) == shown
    assert fed(Cleaner(), list(text), "") == shown


def test_a_hostile_text_is_cleaned_in_linear_time() -> None:
    """A megabyte of string beginnings; a quadratic search would take hours."""
    for text in ("\x9d" * (1 << 20) + "\n", "\x1b[" * (1 << 19), "\x1b]" * (1 << 19) + "\n"):
        fed(Cleaner(), [text], "")


SECRETS = st.lists(st.binary(min_size=1, max_size=6).map(lambda s: s + b"!"), max_size=3)


@given(SECRETS, st.lists(st.binary(max_size=8)), st.data(), CUTS)
def test_no_secret_gets_through(
    secrets: list[bytes], texts: list[bytes], data: st.DataObject, places: list[int]
) -> None:
    """Magics, variables, 4: masked in output, wherever it was cut."""
    parts = [*texts, *secrets]
    text = b"".join(data.draw(st.permutations(parts)))
    shown = fed(Masker(secrets), cut(text, places), b"")
    for secret in secrets:
        if secret.strip(b"*"):
            # What the mask itself and its neighbours form is no disclosure.
            assert secret not in shown or b"***" in secret or _overlaps(secret)
    if not any(secret in text for secret in secrets):
        assert shown == text


def _overlaps(secret: bytes) -> bool:
    return b"*" in secret


def test_a_mask_for_secrets_within_each_other() -> None:
    """The longer one is replaced as a whole, also when it comes byte by byte."""
    text = b"x abcd-efgh abcd y abcd-ef"
    for mask in (lambda t: [t], lambda t: [t[i : i + 1] for i in range(len(t))]):
        pieces: Callable[[bytes], list[bytes]] = mask
        shown = fed(Masker([b"abcd", b"abcd-efgh"]), pieces(text), b"")
        assert shown == b"x *** *** y ***-ef"
