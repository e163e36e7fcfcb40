"""Layers of the configuration: what each may say, and which one wins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from sandbox_kernel.config import (
    DEFAULT_IMAGE,
    SETTINGS,
    VARIABLES,
    ConfigFile,
    Door,
    EngineSettings,
    engine_settings,
    resolve,
    survey,
)
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Policy, parse_policy
from sandbox_kernel.sandbox import spec as sandbox_spec
from sandbox_kernel.sandbox.order import requested_by, settle
from sandbox_kernel.sandbox.spec import SandboxSpec

GRANTS = {
    "devices": ["*"],
    "data_sets": ["*"],
    "mounts": [{"path": "/", "mode": "rw"}],
}
NOTHING: dict[str, Any] = {
    "environ": {},
    "files": (),
    "policy": Policy((parse_policy(json.dumps(GRANTS), "all that must be granted"),)),
}

SAMPLES: dict[str, tuple[Any, Any]] = {
    "image": ("a:1", "b:2"),
    "network": ("none", "internal"),
    "dns": ("192.0.2.1", "192.0.2.2"),
    "require_egress_firewall": (True, False),
    "cpu_limit": (1.0, 2.5),
    "mem_limit": (1 << 30, 1 << 31),
    "pids_limit": (100, 200),
    "tmpfs_size": (1 << 24, 1 << 25),
    "shm_size": (1 << 24, 1 << 25),
    "disk_limit": (1 << 30, 1 << 31),
    "disk_soft_limit": (1 << 30, 1 << 31),
    "runtime": ("runc", "runsc"),
    "isolation": ("container", "vm"),
    "lease_ttl": (10.0, 20.0),
    "idle_ttl": (10.0, 20.0),
    "resumable": (10.0, 20.0),
    "project_limit": (1 << 24, 1 << 25),
    "max_lifetime": (100.0, 200.0),
    "template": ("/a", "b"),
    "template_ignore": (True, False),
    "template_limit": (1 << 30, 1 << 31),
    "project": ("/a", "."),
    "devices": (["gpus=1"], ["gpus=all"]),
    "workspace": ("notebook", "my own"),
    "prefix": ("a-", "b-"),
    "host": ("unix:///a.sock", "unix:///b.sock"),
    "tls_cert_path": ("/a.pem", "/b.pem"),
    "tls_key_path": ("/a.pem", "/b.pem"),
    "tls_ca_path": ("/a.pem", "/b.pem"),
    "allow_insecure_engine": (True, False),
    "pull_policy": ("missing", "always"),
    "timeout": (10.0, 20.0),
    "max_timeout": (300.0, 400.0),
    "files": ("snapshot", "none"),
    "env_keep": (["A"], ["B"]),
    "startup_timeout": (10.0, 20.0),
    "max_message_bytes": (1 << 20, 1 << 21),
    "max_message_parts": (100, 200),
    "local_transport": ("tcp", "ipc"),
}
"""Two values of each setting whose higher layer takes the place of the lower one."""

ODD = {"environment", "data_sets", "mounts", "require_explicit_host"}
"""Settings whose layers add up."""


def a_file(name: str, **sections: dict[str, Any]) -> ConfigFile:
    return ConfigFile(Path(f"/etc/jupyter/{name}"), Config(sections))


def refusal(**layers: Any) -> SandboxSpecRejectedError:
    requested = layers.pop("requested", {})
    with pytest.raises(SandboxSpecRejectedError) as caught:
        resolve(requested, **{**NOTHING, **layers})
    return caught.value


def test_every_setting_has_a_sample_here() -> None:
    assert set(SAMPLES) | ODD == set(SETTINGS)


@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.parametrize("door", ["kernel", "python", "command", "magics"])
def test_each_layer_wins_over_the_ones_below_it(name: str, door: Door) -> None:
    """K7: built-in < environment group < file < kernelspec or caller, at every door."""
    low, high = SAMPLES[name]
    variable = f"SANDBOX_DOCKER_{name.upper()}"
    built_in = SETTINGS[name].built_in
    plain = resolve({}, **NOTHING, door=door).settings[name]
    assert (plain.value, plain.origin.kind) == (built_in, "built-in")
    layers: dict[str, Any] = dict(NOTHING)
    if variable in VARIABLES:
        text = {True: "1", False: "0"}.get(low, str(low)) if isinstance(low, bool) else str(low)
        layers["environ"] = {variable: text}
        found = resolve({}, **layers, door=door).settings[name]
        assert (found.value, found.origin.kind) == (low, "environment")
        assert found.origin.where == variable
    layers["files"] = (a_file("low.json", SandboxDefaults={name: low}),)
    layers["files"] += (a_file("high.py", SandboxDefaults={name: high}),)
    found = resolve({}, **layers, door=door).settings[name]
    assert (found.value, str(found.origin)) == (high, "/etc/jupyter/high.py")
    asked = resolve({name: low}, **layers, door=door)
    if SETTINGS[name].part == "kernel" and door != "kernel":
        # Only kernels are asked: a spec has a field called workspace, which is something else.
        assert asked.further == {name: low}
    else:
        found = asked.settings[name]
        assert (found.value, found.origin.kind) == (low, "caller")
    assert resolve({name: None}, **layers, door=door).settings[name].value == high


def test_a_file_can_give_kernels_other_values_than_the_rest() -> None:
    """K7: under the class of the provisioner, wherever in the order of files."""
    files = (
        a_file("a.json", SandboxProvisioner={"mem_limit": "4G"}),
        a_file("b.json", SandboxDefaults={"mem_limit": "1G"}),
    )
    layers = {**NOTHING, "files": files}
    assert resolve({}, **layers, door="kernel")["mem_limit"] == 4 << 30
    assert resolve({}, **layers, door="python")["mem_limit"] == 1 << 30


@pytest.mark.parametrize("name", ["environment", "data_sets", "mounts"])
def test_what_has_names_adds_up(name: str) -> None:
    """B11, B12, B16: name by name, the higher layer wins."""
    one, two = ("/1", "/2:rw") if name == "mounts" else ("v1", "v2")
    files = (a_file("a.json", SandboxDefaults={name: {"A": one, "B": one}}),)
    found = resolve({name: {"B": two, "C": two}}, **{**NOTHING, "files": files})
    assert found[name] == {"A": one, "B": two, "C": two}
    assert found.spec[name] == found[name]


def test_values_of_variables_are_in_no_representation_and_no_error() -> None:
    """B12, SEC-04"""
    found = resolve({"environment": {"A": "hunter2"}, "labels": {"a": "hunter2"}}, **NOTHING)
    assert "hunter2" not in repr(found)
    for value in ("hunter2", {"A": ["hunter2"]}, ["hunter2"]):
        error = refusal(requested={"environment": value})
        assert error.setting == "environment"
        assert "hunter2" not in str(error)
        error = refusal(files=(a_file("x.json", SandboxDefaults={"environment": value}),))
        assert "hunter2" not in str(error)
        assert "/etc/jupyter/x.json" in str(error)


def test_looking_engines_up_can_be_forbidden_for_good() -> None:
    """E3: a switch for administrators, which no higher layer turns off again."""
    layers = {**NOTHING, "environ": {"SANDBOX_DOCKER_REQUIRE_EXPLICIT_HOST": "1"}}
    assert resolve({"require_explicit_host": False}, **layers).engine.require_explicit_host
    files = (a_file("a.json", SandboxDefaults={"require_explicit_host": True}),)
    layers = {**NOTHING, "files": files}
    assert resolve({"require_explicit_host": False}, **layers).engine.require_explicit_host
    assert not resolve({"require_explicit_host": False}, **NOTHING).engine.require_explicit_host


def test_lists_of_a_python_file_can_be_appended_to() -> None:
    """K7: as in every configuration of traitlets."""
    config = Config()
    config.SandboxDefaults.env_keep.append("LANG")
    files = (
        a_file("a.json", SandboxDefaults={"env_keep": ["TZ"]}),
        ConfigFile(Path("/etc/jupyter/b.py"), config),
    )
    assert resolve({}, **{**NOTHING, "files": files})["env_keep"] == ["TZ", "LANG"]
    assert SETTINGS["env_keep"].built_in == []


def test_the_built_in_defaults_are_those_of_the_spec() -> None:
    """B5: said twice, since the spec must not need the configuration."""
    plain = SandboxSpec()
    fields = {field.name for field in dataclasses.fields(SandboxSpec)}
    for name, setting in SETTINGS.items():
        if name in fields and getattr(plain, name) is not None:
            said = setting.built_in
            given = getattr(plain, name)
            assert given == (tuple(said) if isinstance(said, list) else said), name
    assert SETTINGS["cpu_limit"].built_in == sandbox_spec.DEFAULT_CPU
    assert SETTINGS["mem_limit"].built_in == sandbox_spec.DEFAULT_MEMORY
    assert SETTINGS["tmpfs_size"].built_in == sandbox_spec.DEFAULT_TMPFS
    assert SETTINGS["shm_size"].built_in == sandbox_spec.DEFAULT_SHM
    assert plain.image == DEFAULT_IMAGE


def test_what_nobody_set_is_left_to_the_engines_machine() -> None:
    """B5: two gigabytes would be too many for a small one."""
    assert resolve({}, **NOTHING).spec == {}
    assert resolve({"labels": {"a": "b"}}, **NOTHING).spec == {"labels": {"a": "b"}}


def test_every_setting_explains_itself() -> None:
    """K7: what it does, in a sentence at least, and since when."""
    for setting in SETTINGS.values():
        assert len(setting.help) > 30, setting.name
        assert setting.since in {"0.1", "0.2"}
        assert "  " not in setting.help


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mem_limit", "lots"), ("mem_limit", [1]), ("mem_limit", 1.5), ("cpu_limit", "2"),
        ("cpu_limit", {}), ("pids_limit", 1.5), ("pids_limit", "many"), ("image", 5),
        ("image", ["a"]), ("pull_policy", "often"), ("isolation", "total"), ("env_keep", 3),
        ("env_keep", [1]), ("allow_insecure_engine", "no"), ("local_transport", "pigeon"),
        ("tls_key_path", "key.pem"), ("tls_key_path", 7), ("timeout", "5m"), ("network", 3),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_name_at_every_layer(name: str, value: Any) -> None:
    """K7: naming setting, reason, remedy, and the file that holds it."""
    error = refusal(requested={name: value}, door="kernel")
    assert error.setting == name
    assert error.remedy.endswith(".")
    error = refusal(files=(a_file("x.py", SandboxDefaults={name: value}),))
    assert error.setting == name
    assert "/etc/jupyter/x.py" in error.reason


def test_a_timeout_stays_within_the_longest_one() -> None:
    """C4: what nobody asked for is lowered, what somebody asked for is refused."""
    assert resolve({"max_timeout": 60}, **NOTHING)["timeout"] == 60
    error = refusal(requested={"max_timeout": 60, "timeout": 61})
    assert (error.setting, error.value) == ("timeout", 61)
    assert "max_timeout = 60" in str(error)


def test_what_holds_can_be_looked_at_with_its_origin() -> None:
    """A1"""
    files = (a_file("a.json", SandboxDefaults={"mem_limit": "1G"}),)
    found = survey(environ={"SANDBOX_DOCKER_NETWORK": "internal"}, files=files, policy=Policy())
    assert set(found.settings) == set(SETTINGS)
    origins = {name: e.origin.kind for name, e in found.settings.items()}
    assert (origins["mem_limit"], origins["network"]) == ("file", "environment")
    assert origins["image"] == "built-in"


# -- the environment group ------------------------------------------------------------------------


def test_the_group_is_read() -> None:
    """E1, E2: host, paths and switches; other variables do not matter."""
    settings = engine_settings(
        environ={
            "SANDBOX_DOCKER_HOST": " tcp://h ",
            "SANDBOX_DOCKER_TLS_CERT_PATH": "/c.pem",
            "SANDBOX_DOCKER_TLS_KEY_PATH": "/k.pem",
            "SANDBOX_DOCKER_TLS_CA_PATH": "/ca.pem",
            "SANDBOX_DOCKER_ALLOW_INSECURE_ENGINE": "yes",
            "SANDBOX_DOCKER_REQUIRE_EXPLICIT_HOST": "0",
            "DOCKER_HOST": "unix:///other",
            "SANDBOX_OTHER": "x",
        },
        files=(),
        policy=Policy(),
    )
    assert settings == EngineSettings(
        "tcp://h", Path("/c.pem"), Path("/k.pem"), Path("/ca.pem"), True, False
    )
    nothing = {"environ": {"SANDBOX_DOCKER_HOST": ""}, "files": (), "policy": Policy()}
    assert engine_settings(**nothing) == EngineSettings()


def test_an_unknown_name_in_the_group_is_refused_without_its_value() -> None:
    """E2: a misspelt security setting must not be ignored, a misplaced secret not shown."""
    error = refusal(environ={"SANDBOX_DOCKER_TLS_KEY": "hunter2"})
    assert error.setting == "SANDBOX_DOCKER_TLS_KEY"
    assert "hunter2" not in str(error)
    assert "SANDBOX_DOCKER_TLS_KEY_PATH" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SANDBOX_DOCKER_ALLOW_INSECURE_ENGINE", "perhaps"),
        ("SANDBOX_DOCKER_TLS_CERT_PATH", "relative/cert.pem"),
        ("SANDBOX_DOCKER_CPU_LIMIT", "two"),
        ("SANDBOX_DOCKER_PIDS_LIMIT", "1e3"),
        ("SANDBOX_DOCKER_MEM_LIMIT", "2 parsecs"),
        ("SANDBOX_DOCKER_PULL_POLICY", "often"),
        ("SANDBOX_DOCKER_LOCAL_TRANSPORT", "udp"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused(name: str, value: str) -> None:
    """E2: naming variable and value."""
    error = refusal(environ={name: value})
    assert error.setting == name
    assert value in str(error)


def test_key_material_in_place_of_a_path_is_refused_unseen() -> None:
    """SEC-04: only paths are configuration, at every layer."""
    key = "-----BEGIN PRIVATE KEY-----\nMIGH"
    for layers in (
        {"environ": {"SANDBOX_DOCKER_TLS_KEY_PATH": key}},
        {"files": (a_file("x.py", SandboxDefaults={"tls_key_path": key}),)},
        {"requested": {"tls_key_path": key}},
    ):
        assert "MIGH" not in str(refusal(**layers))


# -- what doors do with it ------------------------------------------------------------------------


def test_of_a_spec_what_differs_from_its_defaults_counts_as_asked_for(config_folder: Path) -> None:
    """K7: the rest is taken from the configuration."""
    (config_folder / "jupyter_sandbox_config.json").write_text(
        '{"SandboxDefaults": {"mem_limit": "1G", "pids_limit": 99}}'
    )
    spec = SandboxSpec(pids_limit=64, environment={"A": "1"}, labels={"a": "b"})
    assert set(requested_by(spec)) == {"pids_limit", "environment", "labels"}
    order = settle(spec, door="python")
    assert (order.spec.mem_limit, order.spec.pids_limit) == (1 << 30, 64)
    assert order.spec.labels == {"a": "b"}
    assert order.spec.environment == {"A": "1"}


def test_a_field_that_a_sandbox_does_not_have_is_refused(config_folder: Path) -> None:
    """K7: with the name that may have been meant."""
    with pytest.raises(SandboxSpecRejectedError, match=r"mem_limt.*Did you mean mem_limit"):
        settle({"mem_limt": "1G"}, door="python")


def test_what_the_spec_refuses_is_told_with_the_file_that_holds_it(config_folder: Path) -> None:
    """K7"""
    path = config_folder / "jupyter_sandbox_config.py"
    path.write_text("c.SandboxDefaults.pids_limit = 1\n")
    with pytest.raises(SandboxSpecRejectedError, match=f"pids_limit = 1.*{path}"):
        settle({}, door="python")


def test_an_engine_of_the_callers_takes_the_place_of_the_configured_one(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1"""
    monkeypatch.setenv("SANDBOX_DOCKER_HOST", "unix:///a.sock")
    assert settle({}, door="python").endpoint().url == "unix:///a.sock"
    assert settle({}, door="python", engine="/b.sock").endpoint().url == "unix:///b.sock"
    given = EngineSettings(host="unix:///c.sock")
    assert settle({}, door="python", engine=given).endpoint().url == "unix:///c.sock"
