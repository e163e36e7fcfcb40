"""Configuration files: where they lie, in which order they hold, and what is refused in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.config import (
    SETTINGS,
    config_folders,
    load_config_files,
    policy_folders,
    resolve,
)
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Policy

PYTHON = "jupyter_sandbox_config.py"
JSON = "jupyter_sandbox_config.json"
DROP_INS = "jupyter_sandbox_config.d"


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def of(setting: str, value: Any) -> dict[str, Any]:
    return {"SandboxDefaults": {setting: value}}


def settle(*folders: Path, **options: Any) -> Any:
    files = load_config_files(folders)
    return resolve({}, environ={}, files=files, policy=Policy(), **options)


def refusal(*folders: Path) -> SandboxSpecRejectedError:
    with pytest.raises(SandboxSpecRejectedError) as caught:
        load_config_files(folders)
    return caught.value


def test_in_one_folder_drop_ins_hold_below_python_below_json(tmp_path: Path) -> None:
    """K7: drop-ins in the order of their names."""
    write(tmp_path / DROP_INS / "20-b.json", of("pids_limit", 102))
    write(tmp_path / DROP_INS / "10-a.json", {"SandboxDefaults": {"pids_limit": 101, "dns": "a"}})
    write(tmp_path / DROP_INS / "ignored.txt", "not JSON")
    assert settle(tmp_path)["pids_limit"] == 102
    write(tmp_path / PYTHON, "c.SandboxDefaults.pids_limit = 103")
    assert settle(tmp_path)["pids_limit"] == 103
    write(tmp_path / JSON, of("pids_limit", 104))
    found = settle(tmp_path)
    assert (found["pids_limit"], found["dns"]) == (104, "a")
    names = [file.path.name for file in load_config_files([tmp_path])]
    assert names == ["10-a.json", "20-b.json", PYTHON, JSON]


def test_a_later_folder_wins_whatever_the_kind_of_its_file(tmp_path: Path) -> None:
    """K7"""
    write(tmp_path / "low" / JSON, of("pids_limit", 101))
    write(tmp_path / "high" / DROP_INS / "x.json", of("pids_limit", 102))
    assert settle(tmp_path / "low", tmp_path / "high")["pids_limit"] == 102
    assert settle(tmp_path / "high", tmp_path / "low")["pids_limit"] == 101


def test_the_folders_are_jupyters_own(config_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K7: the one that wins last; the person's own above the system's."""
    further = config_folder.parent / "further"
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(further))
    folders = config_folders()
    assert folders[-1] == further
    assert folders.index(Path("/etc/jupyter")) < folders.index(config_folder)
    write(config_folder / JSON, of("pids_limit", 111))
    assert resolve({})["pids_limit"] == 111
    write(further / JSON, of("pids_limit", 112))
    assert resolve({})["pids_limit"] == 112


def test_a_changed_file_holds_for_the_next_sandbox(config_folder: Path) -> None:
    """K7: nothing is remembered from the last time."""
    path = write(config_folder / PYTHON, "c.SandboxDefaults.pids_limit = 103")
    assert resolve({})["pids_limit"] == 103
    write(path, "c.SandboxDefaults.pids_limit = 104")
    assert resolve({})["pids_limit"] == 104
    path.unlink()
    assert resolve({})["pids_limit"] == SETTINGS["pids_limit"].built_in


def test_a_python_file_can_compute_and_load_another(tmp_path: Path) -> None:
    """K7: it is Python, as every configuration of Jupyter."""
    write(tmp_path / "common.py", "c.SandboxDefaults.image = 'a:1'")
    write(
        tmp_path / PYTHON,
        "import os\nload_subconfig('common.py')\nc = get_config()\n"
        "c.SandboxDefaults.pids_limit = 50 + 50\nc.SandboxDefaults.env_keep.append('LANG')\n",
    )
    found = settle(tmp_path)
    assert (found["image"], found["pids_limit"], found["env_keep"]) == ("a:1", 100, ["LANG"])


@pytest.mark.parametrize(
    ("content", "setting", "hint"),
    [
        ("c.SandboxDefaults.mem_limt = '2G'", "SandboxDefaults.mem_limt", "mem_limit"),
        ("c.SandboxProvisioner.imagee = 'x'", "SandboxProvisioner.imagee", "image"),
        ("c.SandboxDefalts.image = 'x'", "SandboxDefalts", "SandboxDefaults"),
        ("c.mem_limit = '2G'", "mem_limit", "c.SandboxDefaults.mem_limit"),
        ("c.mem_limt = '2G'", "mem_limt", "mem_limit"),
        ("c.SandboxDefaults.zzzz = 'hunter2'", "SandboxDefaults.zzzz", "mem_limit"),
        ("c.SandboxDefaults.kernel_id = 'x'", "SandboxDefaults.kernel_id", "Known are"),
        ("c.SandboxProvisioner.kernel_spec = 1", "SandboxProvisioner.kernel_spec", "Known are"),
        ("c.SandboxMagics.workspace = 'x'", "SandboxMagics.workspace", "SandboxProvisioner"),
    ],
)
def test_an_unknown_name_is_refused_with_the_one_that_may_have_been_meant(
    tmp_path: Path, content: str, setting: str, hint: str
) -> None:
    """K7: class or trait, and the file is named; its value may be a secret."""
    path = write(tmp_path / PYTHON, content)
    error = refusal(tmp_path)
    assert error.setting == setting
    assert str(path) in error.reason
    assert hint in error.remedy
    assert "hunter2" not in str(error)


def test_the_same_holds_for_json_and_drop_ins(tmp_path: Path) -> None:
    """K7"""
    path = write(tmp_path / "a" / JSON, of("mem_limt", "2G"))
    assert str(path) in refusal(tmp_path / "a").reason
    path = write(tmp_path / "b" / DROP_INS / "x.json", {"Sandbox": {"mem_limit": "2G"}})
    assert str(path) in refusal(tmp_path / "b").reason


def test_options_of_commands_stop_no_kernel(tmp_path: Path) -> None:
    """K7: the commands check their own."""
    write(tmp_path / PYTHON, "c.BuildApp.no_such_option = 1\nc.Application.log_level = 10\n")
    assert settle(tmp_path, door="kernel")["image"] == SETTINGS["image"].built_in


def test_a_class_that_is_only_looked_at_does_no_harm(tmp_path: Path) -> None:
    """K7: traitlets makes an empty section of every name that is read."""
    write(tmp_path / PYTHON, "if c.ServerApp.ip: pass\nc.SandboxDefaults.pids_limit = 99")
    assert settle(tmp_path)["pids_limit"] == 99


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (PYTHON, "c.SandboxDefaults.pids_limit = = 3", "SyntaxError (line 1)"),
        (PYTHON, "x = 1\nnope()\n", "NameError (line 2)"),
        (PYTHON, "\nint('hunter2')\n", "ValueError (line 2)"),
        (PYTHON, "import sys\nsys.exit(3)", "SystemExit (line 2)"),
        (PYTHON, "load_subconfig('nowhere.py')", "ConfigFileNotFound (line 1)"),
        (PYTHON, "raise Exception('hunter2')", "Exception (line 1)"),
        (JSON, "", "not JSON"),
        (JSON, "[]", "not one JSON object"),
        (JSON, '{"SandboxDefaults": {"pids_limit": 1, "pids_limit": 2}}', "'pids_limit' stands"),
        (JSON, '{"SandboxDefaults": {"cpu_limit": NaN}}', "NaN is no number"),
        (JSON, '{"version": 7}', "ends with ValueError"),
        (JSON, "[" * 100_000, "not JSON"),
        (JSON, "\udcff", "not JSON in UTF-8"),
    ],
)
def test_a_broken_file_is_named_with_the_place_and_not_quoted(
    tmp_path: Path, name: str, content: str, said: str
) -> None:
    """K7, SEC-04"""
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    error = refusal(tmp_path)
    assert str(path) in str(error)
    assert said in str(error)
    assert "hunter2" not in str(error)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    """K7: a pipe would hang every start."""
    os.mkfifo(tmp_path / PYTHON)
    assert "not a regular file" in str(refusal(tmp_path))
    (tmp_path / "b" / JSON).mkdir(parents=True)
    assert str(tmp_path / "b" / JSON) in str(refusal(tmp_path / "b"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / JSON).symlink_to("nowhere")
    assert "cannot be read" in str(refusal(tmp_path / "c"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / DROP_INS).write_text("")
    assert load_config_files([tmp_path / "d", tmp_path / "none"]) == ()


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    """K7"""
    (tmp_path / JSON).write_bytes(b" " * ((1 << 20) + 1))
    assert "larger than 1 MiB" in str(refusal(tmp_path))


def test_policies_of_the_system_are_looked_for_whatever_the_environment_says(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: the restricted person sets the environment."""
    fixed = (Path("/etc/jupyter"), Path("/usr/local/etc/jupyter"))
    assert policy_folders()[:2] == fixed
    assert policy_folders()[-1] == config_folder
    for name in ("JUPYTER_NO_CONFIG", "JUPYTER_PLATFORM_DIRS", "JUPYTER_PREFER_ENV_PATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("XDG_CONFIG_DIRS", "/nonexistent")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/nonexistent")
    assert policy_folders()[:2] == fixed


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@given(
    content=st.dictionaries(
        st.sampled_from(["SandboxDefaults", "SandboxProvisioner", "BuildApp", "version"]) | names,
        st.dictionaries(st.sampled_from(sorted(SETTINGS)) | names, values, max_size=3) | values,
        max_size=3,
    )
)
def test_any_json_is_a_configuration_or_a_clear_refusal(
    content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """K7: hostile values included; nothing else ever comes out."""
    folder = tmp_path_factory.mktemp("any")
    write(folder / JSON, content)
    try:
        found = settle(folder, door="kernel")
    except SandboxSpecRejectedError as caught:
        refused = caught
    else:
        assert set(found.settings) == set(SETTINGS)
        return
    assert str(refused).isprintable()
    assert refused.reason
    assert refused.remedy.endswith((".", "?"))
