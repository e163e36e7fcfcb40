"""What is kept of a run's output, in which messages it is shown, and how a result looks."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_magics import view
from sandbox_magics.capture import STDERR, STDOUT, Record
from sandbox_magics.errors import SandboxNetworkDenied, SandboxRunError, SandboxTimeoutError
from sandbox_magics.outlet import FULL, Outlet, Pace, PaceKeeper, Piece
from sandbox_magics.result import SandboxResult

from sandbox_kernel import errors as kernel_errors

STREAMS = st.sampled_from([STDOUT, STDERR])
WRITES = st.lists(st.tuples(STREAMS, st.binary(max_size=40)))


# -- what is kept ---------------------------------------------------------------------------------


@given(WRITES)
def test_everything_is_kept_in_order_below_the_limit(writes: list[tuple[int, bytes]]) -> None:
    """Magics: `.output` is interleaved, each stream is whole."""
    record = Record(1 << 20)
    for stream, data in writes:
        record.add(stream, data)
    assert record.interleaved() == b"".join(data for _, data in writes)
    for stream in (STDOUT, STDERR):
        own = b"".join(data for s, data in writes if s == stream)
        assert record.bytes_of(stream) == own
        assert (record.total(stream), record.cut(stream)) == (len(own), 0)


@given(WRITES, st.integers(2, 60))
def test_beyond_it_both_ends_are_kept_and_the_cut_is_counted(
    writes: list[tuple[int, bytes]], limit: int
) -> None:
    """Peers 11, 12: bounded, marked, never silent."""
    record = Record(limit)
    for stream, data in writes:
        record.add(stream, data)
    for stream in (STDOUT, STDERR):
        own = b"".join(data for s, data in writes if s == stream)
        cut = max(len(own) - limit, 0)
        assert (record.total(stream), record.cut(stream)) == (len(own), cut)
        mark = f"\n[... {cut} bytes cut ...]\n".encode() if cut else b""
        head = own[: limit - limit // 2] if cut else own
        tail = own[len(own) - limit // 2 :] if cut else b""
        assert record.bytes_of(stream) == head + mark + tail


def test_a_byte_of_each_stream_in_turn_stays_small() -> None:
    """A hostile program cannot make the record cost a hundred times what it keeps."""
    import tracemalloc

    tracemalloc.start()
    try:
        record = Record(1 << 20)
        for _ in range(200_000):
            record.add(STDOUT, b"o")
            record.add(STDERR, b"e")
        assert tracemalloc.get_traced_memory()[0] < 32 * 2**20
    finally:
        tracemalloc.stop()
    assert record.bytes_of(STDOUT) == b"o" * 200_000


def test_what_was_lost_on_the_way_is_counted_as_cut() -> None:
    """Peers 12."""
    record = Record(100)
    record.add(STDOUT, b"abc")
    record.miss(STDOUT, 5)
    assert (record.total(STDOUT), record.cut(STDOUT)) == (8, 5)
    assert b"5 bytes cut" in record.bytes_of(STDOUT)


# -- which messages -------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


TEXTS = st.lists(st.tuples(STREAMS, st.text(max_size=30), st.floats(0, 0.2)))


@given(TEXTS, st.integers(0, 300))
def test_all_text_up_to_the_limit_is_shown_in_the_order_of_its_stream(
    writes: list[tuple[int, str, float]], limit: int
) -> None:
    """While it runs, 2: no character is lost, and what is hidden is counted."""
    clock = Clock()
    outlet = Outlet(clock, limit)
    pieces: list[Piece] = []
    for stream, text, pause in writes:
        clock.now += pause
        outlet.add(stream, text)
        pieces += outlet.due()
    pieces += outlet.due(everything=True)
    assert outlet.delay() is None
    whole = "".join(text for _, text, _ in writes)
    assert sum(len(piece.text) for piece in pieces) == min(len(whole), limit)
    assert outlet.hidden == max(len(whole) - limit, 0)
    for stream in (STDOUT, STDERR):
        own = "".join(text for s, text, _ in writes if s == stream)
        assert own.startswith("".join(p.text for p in pieces if p.stream == stream))


def test_at_most_twenty_messages_a_second() -> None:
    """While it runs, 2: many small writes, of both streams in turn."""
    clock = Clock()
    outlet = Outlet(clock, 1 << 20)
    count = 0
    while clock.now < 10:
        outlet.add(STDOUT, "x")
        outlet.add(STDERR, "y")
        count += len(outlet.due())
        clock.now += 0.001
    assert count <= 20 * 10 + 5
    delay = outlet.delay()
    assert delay is not None
    assert 0 < delay <= 0.05


def test_the_first_words_do_not_wait() -> None:
    """Acceptance: output appears at once, and in the order of both streams."""
    outlet = Outlet(Clock(), 1 << 20)
    outlet.add(STDOUT, "a")
    outlet.add(STDERR, "b")
    outlet.add(STDOUT, "c")
    assert outlet.delay() == 0
    assert outlet.due() == [Piece(STDOUT, "a"), Piece(STDERR, "b"), Piece(STDOUT, "c")]


def test_a_flood_goes_in_full_messages() -> None:
    """While it runs, 2: 64 KiB each, whatever the time."""
    outlet = Outlet(Clock(), 1 << 30)
    for _ in range(100):
        outlet.add(STDOUT, "x" * 50_000)
    pieces = outlet.due()
    assert all(len(piece.text) <= FULL for piece in pieces)
    assert len(pieces) <= 5_000_000 / FULL + 1 + 4


def test_behind_a_server_bytes_are_paced() -> None:
    """Issue 6: what a Jupyter server would drop waits instead; in total nothing is lost."""
    clock = Clock()
    pace = PaceKeeper(Pace(burst=1_300_000, rate=450_000), 0.0)
    outlet = Outlet(clock, 1 << 30, pace)
    outlet.add(STDOUT, "x" * 5_000_000)
    sent: list[tuple[float, int]] = []
    while (delay := outlet.delay()) is not None:
        clock.now += delay
        sent += [(clock.now, len(piece.text)) for piece in outlet.due(everything=True)]
    assert sum(size for _, size in sent) == 5_000_000
    for at, _ in sent:
        assert sum(size for other, size in sent if at - 3 <= other <= at) < 2_900_000


# -- results --------------------------------------------------------------------------------------


def result(out: bytes = b"", err: bytes = b"", **given: Any) -> SandboxResult:
    record = Record(1 << 20)
    record.add(STDOUT, out)
    record.add(STDERR, err)
    fields = {
        "run_id": "r12", "name": "[3]", "argv": ("pytest", "-q"), "returncode": 0,
        "reason": "finished", "record": record, "duration": 3.21,
        "started": datetime(2031, 1, 1, tzinfo=UTC), "peak_memory": 41_300_000,
    }  # fmt: skip
    return SandboxResult(**{**fields, **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "✓ exit 0 · 3.2 s · 41 MB peak"),
        ({"returncode": 3}, "✗ exit 3 · 3.2 s · 41 MB peak"),
        (
            {"reason": "timeout", "detail": "after 2m00s"},
            "⏱ stopped after 2m00s · 3.2 s · 41 MB peak",
        ),
        ({"reason": "interrupted"}, "■ stopped · 3.2 s · 41 MB peak"),
        (
            {"reason": "out-of-memory", "detail": "limit 512 MiB", "peak_memory": None},
            "☠ out of memory (limit 512 MiB) · 3.2 s",
        ),
        ({"returncode": None}, "✗ exit code not known · 3.2 s · 41 MB peak"),
        (
            {"reason": "killed", "survivors": True, "network": "egress", "peak_memory": None},
            "■ killed; something of it may still run · 3.2 s · network egress",
        ),
    ],
)
def test_the_footer_says_in_words_how_it_ended(given: dict[str, Any], text: str) -> None:
    """While it runs, 1: the same words as text and as HTML; colour only repeats them."""
    shown = result(**given)
    assert view.footer_text(shown) == text
    markup = view.footer_html(shown)
    for word in text.replace("·", " ").split():
        assert word in markup
    assert repr(shown) == f"<SandboxResult r12 {text}>"


def test_a_result_is_lines_text_and_truth() -> None:
    """What is returned: `.l .n .s`, iteration, `bool`, bytes."""
    shown = result(b"a\nb\n", b"c\xff")
    assert (shown.l, shown.n, shown.s, list(shown)) == (["a", "b"], "a\nb", "a b", ["a", "b"])
    assert (shown.stdout, shown.stderr, shown.stderr_bytes) == ("a\nb\n", "c�", b"c\xff")
    assert bool(shown) is True
    assert not result(returncode=None)
    assert not result(reason="timeout")


def test_html_of_a_result_escapes_everything() -> None:
    """KMS: output is shown as text, never as markup, and cannot change a terminal."""
    hostile = b"<script>alert(1)</script>\x1b[31m\x1b]0;t\x07 & '\""
    for fields in ({}, {"detail": "<b>", "reason": "killed"}):
        markup = result(hostile, hostile, **fields)._repr_html_()
        assert "<script" not in markup
        assert "<b>" not in markup
        assert "\x1b" not in markup
    long = result(b"x" * 200_000)._repr_html_()
    assert len(long) < 80_000
    assert "characters not shown" in long


def test_errors_are_those_that_people_catch_already() -> None:
    """Errors: base classes, the result, the last five lines of stderr."""
    lines = b"".join(b"line %d\n" % n for n in range(20)) + b"\x1b]0;title\x07end\n"
    error = SandboxRunError(result(b"out", lines, returncode=3))
    assert isinstance(error, subprocess.CalledProcessError)
    assert isinstance(error, kernel_errors.SandboxRunError)
    assert (error.returncode, error.stdout, error.cmd) == (3, "out", ["pytest", "-q"])
    assert "line 16" in str(error)
    assert "line 15" not in str(error)
    assert "\x1b" not in str(error)
    late = SandboxTimeoutError(result(b"out", reason="timeout", detail="after 2m00s"))
    assert isinstance(late, TimeoutError)
    assert "stopped after 2m00s" in str(late)
    assert issubclass(SandboxNetworkDenied, PermissionError)
    assert issubclass(SandboxNetworkDenied, kernel_errors.SandboxError)


def test_commands_and_names_are_one_printable_line() -> None:
    """KMS-13: nothing invisible, no turned direction of writing."""
    script = ("bash", "-euo", "pipefail", "-c", "# comment\n\n  echo hi\nls")
    assert view.command_text(script) == "echo hi"
    assert view.command_text(("a", "b\nc", "\u202eexe.txt")) == "a b⏎c \\u202eexe.txt"
    assert len(view.command_text(("x" * 500,))) == 60
