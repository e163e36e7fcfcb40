"""What the patterns in a policy mean: images, addresses of engines, plain names.

A pattern never means more than it shows. ``*`` stands for anything within one part of an
image's path, never for a slash, so that ``registry.example.org/*`` cannot be met by a name of
another registry that merely contains those words.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from sandbox_kernel.errors import SandboxSpecRejectedError

__all__ = [
    "EngineRule",
    "any_name",
    "check_engine",
    "engine_pattern",
    "image_matches",
    "image_pattern",
    "matches_name",
]

ANY_IMAGE: Final = "**"
"""The one pattern that takes an image by its id."""

_DIGEST = re.compile(r"[a-z0-9+._-]+:[0-9a-fA-F]{32,128}")
_IMAGE_ID = re.compile(r"(sha256:)?[0-9a-f]{1,64}")
_IMAGE_TEXT = re.compile(r"(?!.*/(?:[./]|$))[A-Za-z0-9*][A-Za-z0-9._:/@+*-]{0,511}")
_NO_NAME = re.compile(r"(?:^|/)(?:[./]|$)")
"""A part that is empty or begins with a dot: whoever follows that as a path ends elsewhere."""

_HUBS = (
    *("docker.io/library/", "index.docker.io/library/", "docker.io/", "index.docker.io/"),
    "library/",
)
_HOST = re.compile(r"[A-Za-z0-9*._:-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_PORTS = {"http": 2375, "https": 2376}


def matches_name(pattern: str, name: str, *, ignore_case: bool = False) -> bool:
    """Whether a name is one that a pattern with ``*`` stands for."""
    return _name_expression(pattern, ignore_case).fullmatch(name) is not None


def any_name(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns stands for a name."""
    return any(matches_name(pattern, name) for pattern in patterns)


@functools.lru_cache(maxsize=512)
def _name_expression(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    text = ".*".join(re.escape(part) for part in re.split(r"\*+", pattern))
    return re.compile(text, re.DOTALL | (re.IGNORECASE if ignore_case else 0))


# -- images -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Image:
    """An image's name, or a pattern of one, in its parts; `tag` is empty beside a digest."""

    path: str
    tag: str
    digest: str


def image_pattern(text: str) -> str | None:
    """Say what is wrong with a pattern for images, or `None`."""
    if not _IMAGE_TEXT.fullmatch(text):
        return "this is not the name of an image, nor a pattern of one"
    parts = _image(text)
    if "*" in parts.digest and parts.digest != "*":
        return "a digest is written out in full, or '*' for any"
    if parts.digest not in {"", "*"} and not _DIGEST.fullmatch(parts.digest):
        return "what follows '@' is not a digest (sha256:…)"
    return None


def image_matches(pattern: str, image: str) -> bool:
    """Whether a pattern allows an image.

    A pattern without a tag means ``latest``, as everywhere in Docker. An image that is named by
    its digest is allowed by that digest, by ``@*`` or by the tag ``*``: beside a digest the
    engine ignores a tag. One that is named by its id can be any image of the engine, and only
    the id itself or ``**`` allows it.
    """
    if _NO_NAME.search(image):
        return False
    if pattern == ANY_IMAGE:
        return True
    if _IMAGE_ID.fullmatch(image):
        return pattern == image
    if _IMAGE_ID.fullmatch(pattern):
        return False
    wanted, allowed = _image(image), _image(pattern)
    if not _path_expression(allowed.path).fullmatch(wanted.path):
        return False
    if allowed.digest:
        return allowed.digest == wanted.digest or (allowed.digest == "*" and wanted.digest != "")
    if wanted.digest:
        return allowed.tag == "*"
    return matches_name(allowed.tag, wanted.tag)


def _image(text: str) -> _Image:
    name, _, digest = text.partition("@")
    head, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    path = head + slash + last
    for hub in _HUBS:
        if path.startswith(hub):
            path = path.removeprefix(hub)
            break
    return _Image(path, "" if digest else tag or "latest", digest)


@functools.lru_cache(maxsize=512)
def _path_expression(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*+)", pattern)
    text = "".join(
        re.escape(part) if "*" not in part else "[^/]*" if part == "*" else ".*" for part in parts
    )
    return re.compile(text, re.DOTALL)


# -- engines ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineRule:
    """The engines that one policy file allows."""

    allowed: tuple[str, ...]
    said_by: str


def engine_pattern(text: str) -> str | None:
    """Say what is wrong with an entry of ``engine_hosts``, or `None`."""
    if text.startswith("unix:///") and len(text) > len("unix:///"):
        return None
    scheme, _, rest = text.partition("://")
    host, port = _host_and_port(rest)
    fits = _HOST.fullmatch(host) and (port in {"", "*"} or _PORT.fullmatch(port))
    if scheme not in {"tcp", "http", "https"} or not fits:
        return "this is not unix:///path, tcp://host[:port], http://host or https://host"
    return None


def check_engine(rules: Iterable[EngineRule], url: str, source: str) -> None:
    """Refuse an engine that a policy file does not name.

    Parameters
    ----------
    rules
        What the policy files say.
    url
        The engine that was chosen, as in an `Endpoint`.
    source
        What chose it, for the text of an error.

    Raises
    ------
    SandboxSpecRejectedError
        A policy file does not allow this engine.
    """
    for rule in rules:
        if not any(_is_engine(pattern, url) for pattern in rule.allowed):
            allowed = ", ".join(rule.allowed) or "none"
            raise SandboxSpecRejectedError(
                "host",
                url,
                f"the policy in {rule.said_by} does not allow this engine (chosen by {source})",
                f"Use one of those that it allows: {allowed}.",
            )


def _is_engine(pattern: str, url: str) -> bool:
    if pattern.startswith("unix://"):
        if not url.startswith("unix://"):
            return False
        # /var/run is a link to /run on most systems, and both names are in use.
        path, given = url.removeprefix("unix://"), pattern.removeprefix("unix://")
        return matches_name(given, path) or os.path.realpath(given) == os.path.realpath(path)
    if url.startswith("unix://"):
        return False
    wanted = urlsplit(url)
    scheme, _, rest = pattern.partition("://")
    if scheme not in {"tcp", wanted.scheme}:
        return False
    host, port = _host_and_port(rest)
    if port != "*" and int(port or _PORTS[wanted.scheme]) != wanted.port:
        return False
    return matches_name(host, wanted.hostname or "", ignore_case=True)


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":")
    host, _, port = text.partition(":")
    return host, port
