"""Policy files: who can write them decides what they are."""

from __future__ import annotations

import grp
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_kernel.config import engine_settings, resolve
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import POLICY_NAME, Policy, load_policy

ME = os.geteuid()
SOMEBODY = 4321
needs_root = pytest.mark.skipif(ME != 0, reason="only root can give files to others")


def write(folder: Path, content: Any = None, mode: int = 0o644) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / POLICY_NAME
    path.write_text(content if isinstance(content, str) else json.dumps(content or {}))
    path.chmod(mode)
    return path


def refusal(*folders: Path, uid: int = ME) -> str:
    with pytest.raises(SandboxSpecRejectedError) as caught:
        load_policy(folders, uid)
    return str(caught.value)


def test_every_file_that_is_there_counts(tmp_path: Path) -> None:
    """A1: a request must pass all of them."""
    write(tmp_path / "a", {"network": "internal"})
    write(tmp_path / "b", {"caps": {"cpu_limit": {"max": 1}}})
    policy = load_policy([tmp_path / "a", tmp_path / "b", tmp_path / "none", tmp_path / "a"])
    assert [Path(d.source).parent.name for d in policy.documents] == ["a", "b"]
    settings = [e.setting for e in policy.refusals({"network": "egress", "cpu_limit": 2})]
    assert sorted(settings) == ["cpu_limit", "network"]
    assert load_policy([tmp_path / "none"]) == Policy()


@needs_root
def test_a_file_that_only_root_can_change_binds(tmp_path: Path) -> None:
    """A1: all the way from the root folder."""
    write(tmp_path / "a")
    [document] = load_policy([tmp_path / "a"], SOMEBODY).documents
    assert document.binding


@needs_root
def test_a_file_of_the_restricted_person_is_obeyed_and_does_not_bind(tmp_path: Path) -> None:
    """A1: whether the file or a folder above it is theirs."""
    path = write(tmp_path / "a", {"network": "none"})
    os.chown(path, SOMEBODY, SOMEBODY)
    write(tmp_path / "b", {"network": "none"})
    os.chown(tmp_path / "b", SOMEBODY, SOMEBODY)
    for folder in (tmp_path / "a", tmp_path / "b"):
        [document] = load_policy([folder], SOMEBODY).documents
        assert not document.binding
        assert document.network == "none"


@needs_root
@pytest.mark.parametrize("whose", ["file", "folder"])
def test_what_a_third_person_owns_is_refused(tmp_path: Path, whose: str) -> None:
    """A1: they could change it at any time."""
    path = write(tmp_path / "a")
    os.chown(path if whose == "file" else path.parent, SOMEBODY, -1)
    said = refusal(tmp_path / "a", uid=SOMEBODY + 1)
    assert f"uid {SOMEBODY}" in said
    assert "chown root" in said
    assert str(path) in said


def test_what_everybody_can_write_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """A1: file, folder, and a folder further up; a sticky folder protects what is in it."""
    path = write(tmp_path / "a", mode=0o666)
    assert f"chmod o-w {path}" in refusal(tmp_path / "a")
    write(tmp_path / "b" / "c")
    (tmp_path / "b").chmod(0o777)
    assert f"chmod o-w {tmp_path / 'b'}" in refusal(tmp_path / "b" / "c")
    (tmp_path / "b").chmod(0o1777)
    load_policy([tmp_path / "b" / "c"])


@needs_root
def test_what_a_group_can_write_does_not_bind(tmp_path: Path) -> None:
    """A1: unless it is root's own group."""
    path = write(tmp_path / "a", mode=0o664)
    assert load_policy([tmp_path / "a"], SOMEBODY).documents[0].binding
    os.chown(path, 0, SOMEBODY)
    path.chmod(0o664)
    assert not load_policy([tmp_path / "a"], SOMEBODY).documents[0].binding


@needs_root
def test_what_a_group_with_a_third_person_in_it_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: they could change it at any time; the groups of this machine are not changed for that."""
    path = write(tmp_path / "a")
    os.chown(path, 0, SOMEBODY)
    path.chmod(0o664)
    entry = grp.struct_group(("lab", "x", SOMEBODY, ["mallory"]))
    monkeypatch.setattr("grp.getgrgid", lambda gid: entry)
    said = refusal(tmp_path / "a", uid=SOMEBODY)
    assert "mallory" in said
    assert f"chmod g-w {path}" in said


@needs_root
def test_links_are_followed_and_judged_like_what_they_lead_to(tmp_path: Path) -> None:
    """A1: secret mounts are made of links; so are attacks."""
    real = write(tmp_path / "real", {"network": "none"})
    for name, target in (("a", real), ("b", Path("../real") / POLICY_NAME)):
        (tmp_path / name).mkdir()
        (tmp_path / name / POLICY_NAME).symlink_to(target)
        [document] = load_policy([tmp_path / name], SOMEBODY).documents
        assert document.binding
        assert document.network == "none"
    (tmp_path / "folder").symlink_to("real")
    assert load_policy([tmp_path / "folder"], SOMEBODY).documents[0].binding
    os.chown(real.parent, SOMEBODY, -1)
    for name in ("a", "b", "folder"):
        assert not load_policy([tmp_path / name], SOMEBODY).documents[0].binding
        assert f"uid {SOMEBODY}" in refusal(tmp_path / name, uid=SOMEBODY + 1)


@needs_root
def test_a_link_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A1: it can lead elsewhere tomorrow."""
    real = write(tmp_path / "real")
    (tmp_path / "a").mkdir()
    link = tmp_path / "a" / POLICY_NAME
    link.symlink_to(real)
    os.chown(link, SOMEBODY, -1, follow_symlinks=False)
    assert f"uid {SOMEBODY}" in refusal(tmp_path / "a", uid=SOMEBODY + 1)
    assert not load_policy([tmp_path / "a"], SOMEBODY).documents[0].binding


def test_a_file_that_cannot_be_read_refuses_everything(tmp_path: Path) -> None:
    """A1: fails closed, whatever is in its place."""
    for name in "abcd":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / POLICY_NAME).mkdir()
    os.mkfifo(tmp_path / "b" / POLICY_NAME)
    (tmp_path / "c" / POLICY_NAME).symlink_to("nowhere")
    (tmp_path / "d" / POLICY_NAME).symlink_to(POLICY_NAME)
    for name in "abcd":
        said = refusal(tmp_path / name)
        assert str(tmp_path / name / POLICY_NAME) in said
        assert "cannot be read" in said
    write(tmp_path / "e", " " * ((1 << 20) + 1))
    assert "larger than 1 MiB" in refusal(tmp_path / "e")


def test_a_broken_policy_stops_everything_until_it_is_repaired(config_folder: Path) -> None:
    """A1: also what it says nothing of."""
    path = write(config_folder, '{"network": "none", "cpas": {}}')
    for settle in (lambda: resolve({}), engine_settings):
        with pytest.raises(SandboxSpecRejectedError) as caught:
            settle()
        assert caught.value.setting == f"{path}: cpas"
        assert "caps" in caught.value.remedy
    write(config_folder, {"network": "none"})
    resolve({})


def test_the_person_who_asks_learns_where_the_refused_value_stands(config_folder: Path) -> None:
    """A1: the policy's file, and the file or variable that goes beyond it."""
    policy = write(config_folder, {"caps": {"pids_limit": {"max": 100}}})
    config = config_folder / "jupyter_sandbox_config.json"
    config.write_text('{"SandboxDefaults": {"pids_limit": 200}}')
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve({})
    assert str(policy) in caught.value.reason
    assert str(config) in caught.value.reason


AS_PERSON = f"""
import os, sys
import sandbox_kernel.app.config
from sandbox_kernel.app.main import main
os.setgroups([])
os.setegid({SOMEBODY})
os.seteuid({SOMEBODY})
main(["config", "show", "--json"])
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A person's folder. Those of pytest are closed to others, again with each run that starts."""
    with tempfile.TemporaryDirectory(prefix="sbx-test-home-") as folder:
        os.chown(folder, SOMEBODY, SOMEBODY)
        yield Path(folder)


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount namespace")
def test_nobody_gets_around_the_policy_of_the_system(tmp_path: Path, home: Path) -> None:
    """A1: whatever a person sets in the environment and writes into folders of their own.

    The system's folder is one of a mount namespace of its own, and the person is not root.
    """
    for name, content in (
        ("jupyter_sandbox_policy.json", '{"network": "egress", "images": ["**"]}'),
        ("jupyter_sandbox_config.json", '{"SandboxDefaults": {"network": "internal"}}'),
    ):
        (home / name).write_text(content)
        os.chown(home / name, SOMEBODY, SOMEBODY)
    system = tmp_path / "system.json"
    system.write_text('{"network": "none", "images": ["a:1"]}')
    script = f"""
        set -e
        mount -t tmpfs -o mode=755 none /usr/local/etc
        mkdir /usr/local/etc/jupyter
        cp {system} /usr/local/etc/jupyter/{POLICY_NAME}
        exec env {{}} HOME={home} JUPYTER_CONFIG_DIR={home} {sys.executable} -c '{AS_PERSON}'
    """
    for person in ("A=b", "JUPYTER_NO_CONFIG=1", f"JUPYTER_CONFIG_PATH={home}",
                   "JUPYTER_PLATFORM_DIRS=1 XDG_CONFIG_DIRS=/nonexistent"):  # fmt: skip
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script.format(person)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        found = json.loads(done.stdout)
        binding = [p["file"] for p in found["policy"] if p["binding"]]
        assert binding == [f"/usr/local/etc/jupyter/{POLICY_NAME}"]
        refused = {text.partition(" ")[0] for text in found["refusals"]}
        assert "image" in refused
        assert ("network" in refused) == ("NO_CONFIG" not in person)
