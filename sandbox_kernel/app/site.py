"""What a build must know of the site it runs at: certificates, package index, proxies (E6).

The settings become files of the build context under ``site/``, which only the stages of the
Dockerfile see that the image does not contain. Nothing of them becomes a build argument,
because the engine keeps those in an image's history.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_kernel.errors import SandboxSpecRejectedError

__all__ = ["SiteSettings", "detect_site"]

_CA = "/run/site/ca.crt"
_CA_VARIABLES = (
    "PIP_CERT",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_CONFIG_LINE = re.compile(r"^(global|install|:env:)\.([a-z-]+)=(.*)$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """Settings of one site.

    Parameters
    ----------
    ca_bundle
        Certificates (PEM) to trust during the build.
    index_url, extra_index_urls, trusted_hosts
        As pip's options of these names; an address may hold a password.
    proxies
        Values of ``http_proxy``, ``https_proxy``, ``ftp_proxy`` and ``no_proxy``.
    """

    ca_bundle: bytes | None = field(default=None, repr=False)
    index_url: str = field(default="", repr=False)
    extra_index_urls: tuple[str, ...] = field(default=(), repr=False)
    trusted_hosts: tuple[str, ...] = ()
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ca_bundle is not None and _CERTIFICATE not in self.ca_bundle:
            raise SandboxSpecRejectedError(
                "ca_bundle", None, "holds no certificate in PEM form", "Name a bundle in PEM form."
            )
        texts = [self.index_url, *self.extra_index_urls, *self.trusted_hosts]
        if any(_CONTROL.search(text) for text in [*texts, *self.proxies.values()]):
            raise SandboxSpecRejectedError(
                "pip_index_url", None, "holds a control character", "Check the address."
            )

    def files(self) -> dict[str, bytes]:
        """Return the files to add to the build context, by their path in it."""
        variables = {"DEBIAN_FRONTEND": "noninteractive", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        files: dict[str, bytes] = {}
        if self.ca_bundle is not None:
            files["site/ca.crt"] = self.ca_bundle
            variables |= dict.fromkeys(_CA_VARIABLES, _CA)
            # apt reads no variable for this.
            files["site/apt.conf"] = f'Acquire::https::CAInfo "{_CA}";\n'.encode()
            variables["APT_CONFIG"] = "/run/site/apt.conf"
        pip = []
        if self.index_url:
            pip.append(f"index-url = {self.index_url}")
        if self.extra_index_urls:
            pip.append("\n    ".join(["extra-index-url =", *self.extra_index_urls]))
        if self.trusted_hosts:
            pip.append("\n    ".join(["trusted-host =", *self.trusted_hosts]))
        if pip:
            files["site/pip.conf"] = "\n".join(["[global]", *pip, ""]).encode()
            variables["PIP_CONFIG_FILE"] = "/run/site/pip.conf"
        variables |= self.proxies
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
        files["site/env"] = "".join(lines).encode()
        return files


def detect_site(
    environ: Mapping[str, str],
    *,
    ca_bundle: str = "",
    index_url: str = "",
    extra_index_urls: tuple[str, ...] = (),
    pip_config: Callable[[], str] | None = None,
) -> SiteSettings:
    """Take the settings over that pip and the environment use on this machine.

    What reaches the package index from here, reaches it from a build here as well, so the same
    settings are the best guess; what is given wins.

    Parameters
    ----------
    environ
        The environment.
    ca_bundle
        Path of a CA bundle; ``none`` for none at all.
    index_url, extra_index_urls
        Package index; replace what was detected.
    pip_config
        Gives the text of ``pip config list``; asks pip by default.
    """
    configured = _parse(pip_config() if pip_config else _ask_pip())
    extra = extra_index_urls or tuple(configured.get("extra-index-url", "").split())
    url = index_url or configured.get("index-url", "")
    candidates = [configured.get("cert", "")]
    candidates += [environ.get(name, "") for name in ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")]
    return SiteSettings(
        ca_bundle=_bundle(ca_bundle, candidates),
        index_url=url if _reachable(url) else "",
        # A folder of this machine means nothing in a build.
        extra_index_urls=tuple(u for u in extra if _reachable(u)),
        trusted_hosts=tuple(configured.get("trusted-host", "").split()),
        proxies={
            name: value
            for name in _PROXIES
            if (value := environ.get(name) or environ.get(name.upper()))
        },
    )


def _reachable(url: str) -> bool:
    return url.startswith(("https://", "http://"))


def _bundle(given: str, candidates: list[str]) -> bytes | None:
    if given == "none":
        return None
    if given:
        try:
            return Path(given).expanduser().read_bytes()
        except OSError as error:
            raise SandboxSpecRejectedError(
                "ca_bundle", given, f"cannot be read ({error.strerror})", "Name a readable file."
            ) from error
    for candidate in filter(None, candidates):
        try:
            content = Path(candidate).expanduser().read_bytes()
        except OSError:
            continue
        if _CERTIFICATE in content:
            return content
    return None


def _ask_pip() -> str:
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout if asked.returncode == 0 else ""


def _parse(listing: str) -> dict[str, str]:
    """Read ``pip config list``; the environment wins over ``install`` over ``global``."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        if match := _CONFIG_LINE.match(line):
            try:
                value = ast.literal_eval(match[3])
            except (ValueError, SyntaxError):
                continue
            found[match[1]][match[2]] = str(value)
    return {**found["global"], **found["install"], **found[":env:"]}
