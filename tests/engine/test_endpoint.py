"""Which engine is chosen, and what is refused: pure, on made-up homes and environments."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.config import EngineSettings
from sandbox_kernel.engine import endpoint as module
from sandbox_kernel.engine.endpoint import Endpoint, TlsFiles, resolve_endpoint
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError, SandboxUnavailableError
from sandbox_kernel.policy import EngineRule


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """Three files that are there; their content does not matter here."""
    folder = tmp_path / "tls"
    folder.mkdir()
    made = TlsFiles.in_directory(folder)
    for path in (made.cert, made.key, made.ca):
        path.write_text("x")
    return made


def with_tls(host: str, files: TlsFiles) -> EngineSettings:
    return EngineSettings(host, files.cert, files.key, files.ca)


def resolve(host: str | None = None, home: Path = Path("/nowhere"), **environ: str) -> Endpoint:
    return resolve_endpoint(EngineSettings(host), environ, home, roots=home)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("unix:///var/run/docker.sock", "unix:///var/run/docker.sock"),
        ("/var/run/docker.sock", "unix:///var/run/docker.sock"),
        ("  unix:///a b.sock ", "unix:///a b.sock"),
        ("tcp://127.0.0.1:2375", "http://127.0.0.1:2375"),
        ("tcp://127.0.0.1", "http://127.0.0.1:2375"),
        ("tcp://localhost:4243", "http://localhost:4243"),
        ("tcp://[::1]", "http://[::1]:2375"),
        ("http://127.0.0.1", "http://127.0.0.1:2375"),
        ("http://localhost:99/", "http://localhost:99"),
    ],
)
def test_local_forms_are_understood(
    host: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E1: sockets and plain loopback."""
    monkeypatch.setattr(module, "DEFAULT_TLS_DIRECTORY", tmp_path)
    found = resolve(host)
    assert (found.url, found.tls, found.source) == (url, None, "SANDBOX_DOCKER_HOST")
    assert found.is_local


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("tcp://engine.example", "https://engine.example:2376"),
        ("tcp://engine.example:9999", "https://engine.example:9999"),
        ("https://engine.example", "https://engine.example:2376"),
        ("https://10.1.2.3:443", "https://10.1.2.3:443"),
        ("tcp://127.0.0.1", "https://127.0.0.1:2376"),
        ("TCP://[fd00::2]", "https://[fd00::2]:2376"),
    ],
)
def test_network_forms_are_dialled_over_tls(host: str, url: str, files: TlsFiles) -> None:
    """E1, E2: without a port it is 2376 under TLS."""
    found = resolve_endpoint(with_tls(host, files), {}, Path("/nowhere"))
    assert (found.url, found.tls) == (url, files)


@pytest.mark.parametrize(
    "host",
    [
        "docker.sock", "unix://docker.sock", "unix://", "unix:///", "ftp://host", "fd://",
        "tcp://", "tcp://host:notaport", "tcp://host:99999", "tcp://host:0", "tcp://host/path",
        "https://host?x=1", "tcp://ho st", "host:2375", "127.0.0.1", "tcp://[::1", "", "  ",
        "unix:///" + "x" * 200,
    ],
)  # fmt: skip
def test_other_forms_are_refused(host: str) -> None:
    """E1: before anything is dialled, naming setting, value, reason and remedy."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve(host)
    assert caught.value.setting == "host"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("host", "text"), [("ssh://me@host", "ssh -N -L"), ("npipe:////./pipe/docker_engine", "WSL")]
)
def test_roads_that_are_not_built_name_a_way_round(host: str, text: str) -> None:
    """E1: ssh and named pipes are refused with what to do instead."""
    with pytest.raises(SandboxSpecRejectedError, match=text):
        resolve(host)


def test_a_password_in_the_address_is_not_repeated() -> None:
    """SEC-04: an address with credentials is refused without showing them."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve("tcp://user:hunter2@host:2376")
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=60) | st.from_regex(r"(tcp|https?|unix)://[^\n]{0,30}", fullmatch=True))
def test_any_text_is_an_address_or_a_clear_refusal(text: str) -> None:
    """E1: no other exception, and never plain to another machine."""
    try:
        found = resolve(text)
    except SandboxError:
        return
    assert found.tls is not None or found.is_local


@pytest.mark.parametrize("host", ["tcp://10.0.0.1:2375", "tcp://engine.example", "http://10.0.0.1"])
def test_a_plain_connection_to_another_machine_is_refused(
    host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E2, SEC-07: without certificates there is no connection, not a plain one."""
    monkeypatch.setattr(module, "DEFAULT_TLS_DIRECTORY", tmp_path)
    with pytest.raises((SandboxSpecRejectedError, SandboxUnavailableError)) as caught:
        resolve(host)
    assert "allow_insecure_engine" in str(caught.value)


def test_missing_certificate_files_are_named(files: TlsFiles) -> None:
    """E2: the error names each missing path."""
    files.key.unlink()
    with pytest.raises(SandboxUnavailableError) as caught:
        resolve_endpoint(with_tls("tcp://engine.example", files), {}, Path("/nowhere"))
    assert caught.value.kind == "tls"
    assert str(files.key) in str(caught.value)
    assert str(files.cert) not in str(caught.value)


def test_an_insecure_engine_is_allowed_on_request_only(files: TlsFiles) -> None:
    """E2: the switch permits plain; configured files still mean TLS."""
    plain = EngineSettings("tcp://10.0.0.1", allow_insecure_engine=True)
    assert resolve_endpoint(plain, {}, Path("/nowhere")).url == "http://10.0.0.1:2375"
    both = EngineSettings(
        "tcp://10.0.0.1", files.cert, files.key, files.ca, allow_insecure_engine=True
    )
    assert resolve_endpoint(both, {}, Path("/nowhere")).tls == files
    with pytest.raises(SandboxSpecRejectedError, match="TLS files are configured"):
        resolve_endpoint(with_tls("http://127.0.0.1", files), {}, Path("/nowhere"))


def test_the_canonical_mount_is_used_when_it_is_there(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: /certs/client needs no configuration; one configured path leaves the others there."""
    monkeypatch.setattr(module, "DEFAULT_TLS_DIRECTORY", files.ca.parent)
    assert resolve("tcp://engine.example").tls == files
    assert resolve("tcp://127.0.0.1").url == "https://127.0.0.1:2376"
    assert resolve("tcp://127.0.0.1:2375").tls is None
    other = files.ca.parent / "other.pem"
    other.write_text("x")
    settings = EngineSettings("tcp://engine.example", tls_ca_path=other)
    assert resolve_endpoint(settings, {}, Path("/nowhere")).tls == TlsFiles(
        files.cert, files.key, other
    )


def test_docker_host_is_used_when_nothing_is_configured(files: TlsFiles) -> None:
    """E3: the variables of the docker command, verified in any case."""
    assert resolve(DOCKER_HOST="unix:///x.sock") == Endpoint("unix:///x.sock", None, "DOCKER_HOST")
    folder = str(files.ca.parent)
    for verify in ("1", "0", ""):
        found = resolve(
            DOCKER_HOST="tcp://h:2376", DOCKER_TLS_VERIFY=verify, DOCKER_CERT_PATH=folder
        )
        assert (found.url, found.tls) == ("https://h:2376", files)
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve(DOCKER_HOST="nonsense")
    assert caught.value.setting == "DOCKER_HOST"


def test_our_own_setting_wins_over_the_environment_of_docker() -> None:
    """SEC-07: DOCKER_HOST does not redirect a configured engine."""
    found = resolve("unix:///ours.sock", DOCKER_HOST="unix:///theirs.sock", DOCKER_CONTEXT="x")
    assert found.url == "unix:///ours.sock"


def make_context(home: Path, name: str, host: str, **more: object) -> Path:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = home / ".docker/contexts/meta" / digest
    meta.mkdir(parents=True)
    document = {"Name": name, "Endpoints": {"docker": {"Host": host, **more}}}
    (meta / "meta.json").write_text(json.dumps(document))
    return home / ".docker/contexts/tls" / digest / "docker"


def test_the_current_context_of_docker_is_used(tmp_path: Path) -> None:
    """E3, peers 15: as the docker command does, with its TLS files; DOCKER_CONTEXT wins over it."""
    folder = make_context(tmp_path, "remote", "tcp://engine.example:2376")
    folder.mkdir(parents=True)
    files = TlsFiles.in_directory(folder)
    for path in (files.cert, files.key, files.ca):
        path.write_text("x")
    make_context(tmp_path, "colima", "unix:///colima.sock")
    (tmp_path / ".docker/config.json").write_text(json.dumps({"currentContext": "remote"}))
    found = resolve(home=tmp_path)
    assert (found.url, found.tls) == ("https://engine.example:2376", files)
    assert found.source == "docker context 'remote'"
    assert resolve(home=tmp_path, DOCKER_CONTEXT="colima").url == "unix:///colima.sock"
    assert resolve(home=tmp_path, DOCKER_HOST="unix:///h").url == "unix:///h"
    moved = tmp_path / "moved"
    (tmp_path / ".docker").rename(moved)
    assert resolve(home=tmp_path, DOCKER_CONFIG=str(moved)).url == found.url


def test_a_context_that_does_not_verify_is_refused(tmp_path: Path) -> None:
    """E2: TLS without verification is not TLS."""
    make_context(tmp_path, "lax", "tcp://h:2376", SkipTLSVerify=True)
    with pytest.raises(SandboxSpecRejectedError, match="verification"):
        resolve(home=tmp_path, DOCKER_CONTEXT="lax")


@pytest.mark.parametrize("broken", [None, "not json", "[]", '{"Endpoints": 3}', "{}"])
def test_a_context_without_a_description_is_an_error(tmp_path: Path, broken: str | None) -> None:
    """E3: a context that somebody chose is never silently skipped."""
    if broken is not None:
        make_context(tmp_path, "gone", "x")
        for meta in tmp_path.rglob("meta.json"):
            meta.write_text(broken)
    with pytest.raises(SandboxUnavailableError, match="'gone'") as caught:
        resolve(home=tmp_path, DOCKER_CONTEXT="gone")
    assert caught.value.kind == "not-configured"


def listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    # Short names, or a deep temporary folder would exceed what a socket's path may hold.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        made.bind(path.name)
    finally:
        os.chdir(here)
    return made


@pytest.mark.parametrize(
    ("where", "product"),
    [
        ("var/run/docker.sock", "Docker"),
        ("run/docker.sock", "Docker"),
        ("xdg/docker.sock", "rootless Docker"),
        (".docker/run/docker.sock", "Docker Desktop"),
        (".docker/desktop/docker.sock", "Docker Desktop"),
        (".colima/default/docker.sock", "Colima"),
        (".rd/docker.sock", "Rancher Desktop"),
        (".orbstack/run/docker.sock", "OrbStack"),
        ("xdg/podman/podman.sock", "rootless Podman"),
        ("run/podman/podman.sock", "Podman"),
    ],
)
def test_each_usual_socket_is_found(tmp_path: Path, where: str, product: str) -> None:
    """E3: the product and the path are named."""
    with listen(tmp_path / where):
        found = resolve(home=tmp_path, XDG_RUNTIME_DIR=str(tmp_path / "xdg"))
    assert found.url == f"unix://{tmp_path / where}"
    assert f"{product} (" in found.source
    assert found.candidates[0] == "DOCKER_HOST (not set)"


def test_a_file_that_is_no_socket_is_passed_over(tmp_path: Path) -> None:
    """E3: only sockets count."""
    plain = tmp_path / "var/run/docker.sock"
    plain.parent.mkdir(parents=True)
    plain.write_text("")
    with listen(tmp_path / ".rd/docker.sock"):
        found = resolve(home=tmp_path)
    assert found.url.endswith("/.rd/docker.sock")
    assert f"{plain} (no such socket)" in found.candidates


@pytest.mark.skipif(os.geteuid() != 0, reason="a root engine's socket can be made by root only")
def test_a_socket_that_may_be_used_is_preferred() -> None:
    """E3: a rootless engine is taken when the root one is closed to this user."""
    # The folders that pytest gives are closed to others.
    with tempfile.TemporaryDirectory(prefix="sbx-test-sockets-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with listen(folder / "var/run/docker.sock"), listen(folder / "xdg/docker.sock"):
            (folder / "var/run/docker.sock").chmod(0o600)
            (folder / "xdg/docker.sock").chmod(0o666)
            environ = {"XDG_RUNTIME_DIR": str(folder / "xdg")}
            os.seteuid(65534)
            try:
                found = resolve_endpoint(EngineSettings(), environ, folder, roots=folder)
            finally:
                os.seteuid(0)
    assert "rootless" in found.source
    assert f"{folder / 'var/run/docker.sock'} (permission denied)" in found.candidates


def test_nothing_found_lists_what_was_tried(tmp_path: Path) -> None:
    """E3: the error says where it looked and how to get an engine."""
    with pytest.raises(SandboxUnavailableError, match="apt-get install") as caught:
        resolve(home=tmp_path)
    assert caught.value.kind == "not-configured"
    for part in ("DOCKER_HOST", "docker context", ".colima", ".orbstack", "podman.sock"):
        assert part in str(caught.value)


def test_an_administrator_can_forbid_looking_one_up(tmp_path: Path) -> None:
    """E3: require_explicit_host leaves only the configured host."""
    settings = EngineSettings(require_explicit_host=True)
    with listen(tmp_path / "var/run/docker.sock"), pytest.raises(SandboxUnavailableError) as caught:
        resolve_endpoint(settings, {"DOCKER_HOST": "unix:///x"}, tmp_path, roots=tmp_path)
    assert caught.value.kind == "not-configured"
    explicit = EngineSettings("unix:///x", require_explicit_host=True)
    assert resolve_endpoint(explicit, {}, tmp_path).url == "unix:///x"


def test_an_engine_that_was_looked_up_is_judged_by_the_policy_too(tmp_path: Path) -> None:
    """A1: whichever rule chose it, and by whichever of its names."""
    rule = EngineRule((f"unix://{tmp_path}/var/run/docker.sock",), "/etc/policy.json")
    settings = EngineSettings(allowed=(rule,))
    make_context(tmp_path, "other", "unix:///other.sock")
    for environ, chosen_by in (
        ({"DOCKER_HOST": "unix:///other.sock"}, "DOCKER_HOST"),
        ({"DOCKER_CONTEXT": "other"}, "docker context 'other'"),
    ):
        with pytest.raises(SandboxSpecRejectedError) as caught:
            resolve_endpoint(settings, environ, tmp_path, roots=tmp_path)
        for part in ("unix:///other.sock", chosen_by, "/etc/policy.json"):
            assert part in str(caught.value)
    with listen(tmp_path / "var/run/docker.sock"):
        found = resolve_endpoint(settings, {}, tmp_path, roots=tmp_path)
        assert found.url == f"unix://{tmp_path}/var/run/docker.sock"
        (tmp_path / "run").symlink_to("var/run")
        environ = {"DOCKER_HOST": f"unix://{tmp_path}/run/docker.sock"}
        assert resolve_endpoint(settings, environ, tmp_path).source == "DOCKER_HOST"
