"""What a build takes over from the site, and where it ends up (E6)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.app.site import SiteSettings, detect_site
from sandbox_kernel.errors import SandboxSpecRejectedError

PEM = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def no_pip() -> str:
    return ""


def test_nothing_configured_gives_only_the_environment_of_the_build() -> None:
    """E6"""
    site = detect_site({}, pip_config=no_pip)
    assert list(site.files()) == ["site/env"]


def test_pip_settings_of_this_machine_are_taken_over(tmp_path: Path) -> None:
    """E6"""
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(PEM)
    listing = (
        f"global.cert='{bundle}'\n"
        "global.index-url='https://old.example.org/simple'\n"
        "global.find-links='/srv/wheels'\n"
        "global.extra-index-url='file:///srv/simple https://more.example.org/simple'\n"
        ":env:.index-url='https://user:secret@new.example.org/simple'\n"
    )
    files = detect_site({}, pip_config=lambda: listing).files()
    assert files["site/ca.crt"] == PEM
    conf = files["site/pip.conf"].decode()
    assert "index-url = https://user:secret@new.example.org/simple\n" in conf
    assert "https://more.example.org/simple" in conf
    assert "old.example.org" not in conf
    assert "file:" not in conf  # a folder of this machine means nothing in a build
    assert b"secret" not in files["site/env"]
    assert b"PIP_CONFIG_FILE=/run/site/pip.conf" in files["site/env"]


def test_what_is_given_wins_over_what_was_found(tmp_path: Path) -> None:
    """E6"""
    bundle = tmp_path / "mine.pem"
    bundle.write_bytes(PEM + b"mine")
    site = detect_site(
        {"SSL_CERT_FILE": "/nonexistent"},
        ca_bundle=str(bundle),
        index_url="https://mine.example.org/simple",
        pip_config=lambda: "global.index-url='https://other.example.org/simple'\n",
    )
    assert site.ca_bundle == PEM + b"mine"
    assert site.index_url == "https://mine.example.org/simple"


def test_certificates_can_be_left_out(tmp_path: Path) -> None:
    """E6"""
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(PEM)
    site = detect_site({"SSL_CERT_FILE": str(bundle)}, ca_bundle="none", pip_config=no_pip)
    assert site.ca_bundle is None


def test_proxies_are_taken_over_in_either_spelling() -> None:
    """E6"""
    environ = {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "localhost", "http_proxy": ""}
    site = detect_site(environ, pip_config=no_pip)
    assert site.proxies == {"https_proxy": "http://proxy:3128", "no_proxy": "localhost"}


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"no pem", "holds no certificate")]
)
def test_a_bundle_that_is_none_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    """E6"""
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_bytes(content)
    with pytest.raises(SandboxSpecRejectedError, match=said):
        detect_site({}, ca_bundle=str(bundle), pip_config=no_pip)


def test_an_index_cannot_bring_lines_of_its_own_into_the_settings() -> None:
    """E6"""
    with pytest.raises(SandboxSpecRejectedError):
        SiteSettings(index_url="https://a/simple\nproxy = http://evil")


def test_no_secret_shows_in_a_repr() -> None:
    """E6, B12"""
    site = SiteSettings(index_url="https://u:secret@a/simple", proxies={"http_proxy": "secret"})
    assert "secret" not in repr(site)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40))
def test_a_shell_reads_each_value_back_as_it_was(value: str) -> None:
    """E6"""
    script = SiteSettings(proxies={"http_proxy": value}).files()["site/env"]
    done = subprocess.run(
        ["sh", "-c", script.decode() + 'printf %s "$http_proxy"'], capture_output=True, check=True
    )
    assert done.stdout.decode() == value
