"""What can be awaited or entered, and makes something."""

from __future__ import annotations

from typing import Self

import pytest

from sandbox_kernel.sandbox.opening import Opening


class Thing:
    """Cannot be entered."""

    left: BaseException | None = None

    async def __aenter__(self) -> Self:
        raise ZeroDivisionError

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.left = error


async def test_what_was_made_and_cannot_be_entered_is_left_again() -> None:
    """B13: nobody else could."""
    thing = Thing()

    async def make() -> Thing:
        return thing

    with pytest.raises(ZeroDivisionError):
        async with Opening(make):
            pass
    assert isinstance(thing.left, ZeroDivisionError)
