"""Artifacts: the files that a run leaves in ``/output``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["Artifacts"]


class Artifacts(Mapping[str, bytes]):
    """The files of a run, by their paths below ``/output``."""

    def __getitem__(self, name: str) -> bytes:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def _repr_html_(self) -> str:
        return ""
