"""Policies: what one file may say, and how requests are judged by it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from sandbox_kernel.config import SETTINGS
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import (
    Owner,
    Policy,
    PolicyDocument,
    check_engine,
    parse_policy,
    statements,
)

GIB = 1 << 30
BUILT_IN = {name: setting.built_in for name, setting in SETTINGS.items()}
FILE = "/etc/jupyter/jupyter_sandbox_policy.json"


def policy(**content: Any) -> Policy:
    return Policy((parse_policy(json.dumps(content), FILE, binding=True),))


def refusal(rules: Policy, **request: Any) -> SandboxSpecRejectedError:
    with pytest.raises(SandboxSpecRejectedError) as caught:
        rules.judge(request, built_in=BUILT_IN)
    return caught.value


def filled(rules: Policy, **request: Any) -> dict[str, Any]:
    decision = rules.judge(request, built_in=BUILT_IN)
    return {name: filling.value for name, filling in decision.filled.items()}


ALLOWED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": 4 * GIB}),
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": "4G"}),
    ({"caps": {"mem_limit": {"default": "1G"}}}, {"mem_limit": 64 * GIB}),
    ({"caps": {"cpu_limit": {"max": 2}}}, {"cpu_limit": 2.0}),
    ({"caps": {"pids_limit": {"max": 300}}}, {"pids_limit": 300}),
    ({"caps": {"tmpfs_size": {"max": "1M"}}}, {"tmpfs_size": 1 << 20}),
    ({"caps": {"shm_size": {"max": "1M"}}}, {"shm_size": 1 << 20}),
    ({"caps": {"disk_limit": {"max": "1G"}}}, {"disk_limit": GIB}),
    ({"caps": {"disk_soft_limit": {"max": "1G"}}}, {"disk_soft_limit": "1G"}),
    ({"caps": {"max_lifetime": {"max": 3600}}}, {"max_lifetime": 3600.0}),
    ({"caps": {"idle_ttl": {"max": 3600}}}, {"idle_ttl": 60}),
    ({"caps": {"lease_ttl": {"max": 60}}}, {"lease_ttl": 60}),
    ({"caps": {"resumable": {"max": 60}}}, {"resumable": 60}),
    ({"caps": {"project_limit": {"max": "1M"}}}, {"project_limit": "1M"}),
    ({"caps": {"timeout": {"max": 600}}}, {"timeout": 600, "max_timeout": 600}),
    ({"network": "internal"}, {"network": "internal"}),
    ({"network": "internal"}, {"network": "none"}),
    ({"network": "none"}, {}),
    ({"require_egress_firewall": True}, {"require_egress_firewall": True}),
    ({"isolation": "vm"}, {"isolation": "vm"}),
    ({"runtimes": ["runc", "runsc*"]}, {"runtime": "runsc-kvm"}),
    ({"images": ["a/b:*"]}, {"image": "a/b:1.2"}),
    ({"allow_pull": False}, {"pull_policy": "never"}),
    ({"allow_insecure_engine": False}, {"allow_insecure_engine": False}),
    ({"mounts": [{"path": "/srv/data"}]}, {"mounts": {"m": "/srv/data/a"}}),
    ({"mounts": [{"path": "/srv", "mode": "rw"}]}, {"mounts": {"m": "/srv:rw"}}),
    ({"mounts": [{"path": "/"}]}, {"mounts": {"m": "/srv"}}),
    ({"data_sets": ["mnist", "course-*"]}, {"data_sets": ["mnist", "course-1"]}),
    ({"data_sets": ["v-*"]}, {"data_sets": {"x": "v-1"}}),
    ({"devices": ["gpu*"]}, {"devices": ("gpu:0",)}),
    ({"forbidden_environment": ["AWS_*"]}, {"environment": {"A": "1"}, "env_keep": ["LANG"]}),
    ({"max_sandboxes": 1}, {}),
]

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": 4 * GIB + 1}, "mem_limit", "4 GiB"),
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": "5G"}, "mem_limit", "5 GiB is more"),
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": "lots"}, "mem_limit", "4 GiB"),
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": float("nan")}, "mem_limit", "4 GiB"),
    ({"caps": {"mem_limit": {"max": "4G"}}}, {"mem_limit": True}, "mem_limit", "4 GiB"),
    ({"caps": {"cpu_limit": {"max": 2}}}, {"cpu_limit": 2.01}, "cpu_limit", "at most 2"),
    ({"caps": {"cpu_limit": {"max": 2}}}, {"cpu_limit": float("inf")}, "cpu_limit", "at most 2"),
    ({"caps": {"pids_limit": {"max": 100}}}, {"pids_limit": 101}, "pids_limit", "at most 100"),
    ({"caps": {"tmpfs_size": {"max": "1M"}}}, {"tmpfs_size": "2M"}, "tmpfs_size", "1 MiB"),
    ({"caps": {"shm_size": {"max": "1M"}}}, {"shm_size": "2M"}, "shm_size", "1 MiB"),
    ({"caps": {"disk_limit": {"max": "1G"}}}, {"disk_limit": "2G"}, "disk_limit", "1 GiB"),
    ({"caps": {"disk_soft_limit": {"max": "1M"}}}, {"disk_soft_limit": 1 << 21}, "disk_soft_limit",
     "1 MiB"),
    ({"caps": {"max_lifetime": {"max": 10}}}, {"max_lifetime": 11}, "max_lifetime", "at most 10"),
    ({"caps": {"idle_ttl": {"max": 10}}}, {"idle_ttl": 11}, "idle_ttl", "at most 10"),
    ({"caps": {"lease_ttl": {"max": 10}}}, {"lease_ttl": 11}, "lease_ttl", "at most 10"),
    ({"caps": {"resumable": {"max": 10}}}, {"resumable": 11}, "resumable", "at most 10"),
    ({"caps": {"project_limit": {"max": "1M"}}}, {"project_limit": "2M"}, "project_limit", "1 MiB"),
    ({"caps": {"timeout": {"max": 10}}}, {"timeout": 11}, "timeout", "at most 10"),
    ({"caps": {"timeout": {"max": 10}}}, {"max_timeout": 11}, "max_timeout", "at most 10"),
    ({"network": "internal"}, {"network": "egress"}, "network", "nothing above 'internal'"),
    ({"network": "none"}, {"network": "internal"}, "network", "nothing above 'none'"),
    ({"network": "none"}, {"network": "host"}, "network", "nothing above 'none'"),
    ({"require_egress_firewall": True}, {"require_egress_firewall": False},
     "require_egress_firewall", "demands the proof"),
    ({"isolation": "vm"}, {"isolation": "container"}, "isolation", "nothing below 'vm'"),
    ({"runtimes": ["runc"]}, {"runtime": "runsc"}, "runtime", "'runc'"),
    ({"runtimes": []}, {}, "runtime", "None is allowed"),
    ({"images": ["a/b:*"]}, {"image": "a/c:1"}, "image", "'a/b:*'"),
    ({"images": ["a/b:*"]}, {}, "image", "'a/b:*'"),
    ({"images": []}, {}, "image", "None is allowed"),
    ({"allow_pull": False}, {"pull_policy": "missing"}, "pull_policy", "no image to be pulled"),
    ({"allow_insecure_engine": False}, {"allow_insecure_engine": True},
     "allow_insecure_engine", "no plain connection"),
    ({}, {"mounts": {"m": "/srv:ro"}}, "mounts", "It grants none"),
    ({"mounts": [{"path": "/srv/data"}]}, {"mounts": {"m": "/srv/database"}}, "mounts", "(ro)"),
    ({"mounts": [{"path": "/srv/data"}]}, {"mounts": {"m": "/srv/data:rw"}},
     "mounts", "for writing"),
    ({"data_sets": ["mnist"]}, {"data_sets": ["mnist", "other"]}, "data_sets", "'mnist'"),
    ({"data_sets": ["x"]}, {"data_sets": {"x": "v-1"}}, "data_sets", "'x'"),
    ({}, {"data_sets": "mnist"}, "data_sets", "It grants none"),
    ({}, {"devices": ["gpu"]}, "devices", "It grants none"),
    ({"forbidden_environment": ["AWS_*", "*TOKEN*"]}, {"environment": {"my_token": "hunter2"}},
     "environment", "'*TOKEN*'"),
    ({"forbidden_environment": ["AWS_*"]}, {"env_keep": ["AWS_KEY"]}, "env_keep", "'AWS_*'"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "request_"), ALLOWED)
def test_what_is_within_the_limits_is_allowed(
    content: dict[str, Any], request_: dict[str, Any]
) -> None:
    """A1, B5: also exactly at the limit."""
    policy(**content).judge(request_, built_in=BUILT_IN)


@pytest.mark.parametrize(("content", "request_", "setting", "said"), REFUSED)
def test_what_is_beyond_is_refused_with_setting_value_limit_and_file(
    content: dict[str, Any], request_: dict[str, Any], setting: str, said: str
) -> None:
    """A1, B5: never lowered in silence."""
    error = refusal(policy(**content), **request_)
    assert error.setting == setting
    assert said in str(error)
    assert FILE in error.reason
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    "folder",
    ["/srv/data/../x", "srv", "/srv:ro,rw", "/srv:/etc:rw", "/srv/", "//srv", "/srv\0", ""],
)
def test_what_is_no_plain_folder_is_refused_wherever_it_may_lead(folder: str) -> None:
    """B11: before anything is compared with what is granted."""
    rules = policy(mounts=[{"path": "/", "mode": "rw"}])
    assert refusal(rules, mounts={"m": folder}).setting == "mounts"


def test_without_a_file_nothing_is_restricted_and_nothing_is_granted() -> None:
    """A1, B11, B15, B16"""
    nothing = Policy()
    request = {"image": "any:1", "mem_limit": 1 << 50, "network": "egress", "runtime": "x"}
    assert nothing.judge(request, built_in=BUILT_IN).filled == {}
    for setting, value in (
        ("mounts", {"m": "/srv"}), ("data_sets", ["a"]), ("devices", ["gpu"]),
    ):  # fmt: skip
        error = refusal(nothing, **{setting: value})
        assert error.setting == setting
        assert "built-in policy" in error.reason


def test_a_field_that_no_policy_knows_is_passed_over() -> None:
    """A1: later fields of a request need no change here."""
    assert filled(policy(images=["**"]), labels={"a": "b"}, workspace="x") == {}


@pytest.mark.parametrize(
    ("caps", "name", "expected"),
    [
        ({"max": "4G"}, "mem_limit", None),
        ({"max": "1G"}, "mem_limit", GIB),
        ({"max": "8G", "default": "4G"}, "mem_limit", 4 * GIB),
        ({"default": "1G"}, "mem_limit", GIB),
        ({"max": 100}, "pids_limit", 100),
        ({"max": 1000}, "pids_limit", None),
        ({"max": 3600}, "max_lifetime", 3600),
        ({"max": "10G"}, "disk_limit", 10 * GIB),
        ({"max": 60}, "timeout", 60),
        ({"max": 600}, "timeout", None),
    ],
)
def test_what_a_request_leaves_out_is_the_default_or_the_limit_whichever_is_less(
    caps: dict[str, Any], name: str, expected: float | None
) -> None:
    """A1, B5: and stays with the built-in default where that is within the limit."""
    assert filled(policy(caps={name: caps})).get(name) == expected


def test_a_default_timeout_does_not_bound_the_longest_one() -> None:
    """C4"""
    found = filled(policy(caps={"timeout": {"max": 600, "default": 30}}))
    assert found == {"timeout": 30, "max_timeout": 600}


def test_other_things_that_are_left_out_take_what_is_allowed() -> None:
    """A1, B14"""
    assert filled(policy(isolation="vm")) == {"isolation": "vm"}
    assert filled(policy(runtimes=["r*", "runsc", "runc"])) == {"runtime": "runsc"}
    assert filled(policy(require_egress_firewall=True)) == {"require_egress_firewall": True}
    assert filled(policy(network="none", allow_pull=False, allow_insecure_engine=False)) == {}


def test_the_number_of_sandboxes_is_judged_where_it_was_counted() -> None:
    """A1"""
    rules = policy(max_sandboxes=2)
    decision = rules.judge({}, Owner("ann", 1), BUILT_IN)
    assert decision.quota is not None
    assert (decision.quota.most, decision.quota.said_by) == (2, FILE)
    with pytest.raises(SandboxSpecRejectedError, match=r"max_sandboxes.*'ann' has 2.*allows 2"):
        rules.judge({}, Owner("ann", 2), BUILT_IN)
    with pytest.raises(SandboxSpecRejectedError):
        policy(max_sandboxes=0).judge({}, Owner("ann", 0), BUILT_IN)


def test_everything_that_speaks_against_a_request_can_be_listed() -> None:
    """A1: for the person who wants to know before trying."""
    rules = policy(network="none", images=["a:1"], caps={"cpu_limit": {"max": 1}})
    request = {"network": "egress", "image": "b:1", "cpu_limit": 2}
    settings = [error.setting for error in rules.refusals(request, built_in=BUILT_IN)]
    assert sorted(settings) == ["cpu_limit", "image", "network"]


# -- images ---------------------------------------------------------------------------------------

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32


@pytest.mark.parametrize(
    ("pattern", "image", "allowed"),
    [
        ("python", "python", True),
        ("python", "python:latest", True),
        ("python", "python:3", False),
        ("python:latest", "docker.io/library/python", True),
        ("docker.io/library/python", "python:latest", True),
        ("index.docker.io/a/b:1", "a/b:1", True),
        ("python:3.*", "python:3.12", True),
        ("python:3.*", "python:4", False),
        ("python:*", "python", True),
        ("python:*", "evil/python", False),
        ("python:*", "python-evil:1", False),
        ("r.example.org/*:*", "r.example.org/a:1", True),
        ("r.example.org/*:*", "r.example.org/a/b:1", False),
        ("r.example.org/**:*", "r.example.org/a/b:1", True),
        ("r.example.org:5000/a:1", "r.example.org:5000/a:1", True),
        ("r.example.org:5000/a", "r.example.org/a", False),
        ("*.example.org/a", "evil.com/x.example.org/a", False),
        ("r.example.org/*", "evil.com/r.example.org/a", False),
        ("r.example.org/*", "r.example.org.evil.com/a", False),
        ("a.b/c", "axb/c", False),
        ("*", "python", True),
        ("*", "a/b", False),
        ("**", "a/b:1@" + DIGEST, True),
        ("**", "0123456789ab", True),
        # By its digest, beside which the engine ignores a tag.
        (f"a/b@{DIGEST}", f"a/b@{DIGEST}", True),
        (f"a/b@{DIGEST}", f"a/b:9@{DIGEST}", True),
        (f"a/b@{DIGEST}", f"a/b@{OTHER}", False),
        (f"a/b@{DIGEST}", "a/b", False),
        (f"a/b@{DIGEST}", f"a/c@{DIGEST}", False),
        ("a/b@*", f"a/b@{OTHER}", True),
        ("a/b@*", "a/b:latest", False),
        ("a/b:3", f"a/b:3@{OTHER}", False),
        ("a/b:*", f"a/b@{OTHER}", True),
        # An id can be any image of the engine.
        ("*", "0123456789ab", False),
        ("*:*", "abc", False),
        ("*", DIGEST, False),
        (DIGEST, DIGEST, True),
        ("abc", "abc", True),
    ],
)
def test_an_image_fits_a_pattern_or_not(pattern: str, image: str, allowed: bool) -> None:
    """A1: names, tags, digests, ids, and names that only look like allowed ones."""
    rules = policy(images=[pattern])
    if allowed:
        rules.judge({"image": image}, built_in=BUILT_IN)
    else:
        assert refusal(rules, image=image).setting == "image"


# -- engines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "url", "allowed"),
    [
        ("unix:///var/run/docker.sock", "unix:///var/run/docker.sock", True),
        ("unix:///run/user/*/docker.sock", "unix:///run/user/1000/docker.sock", True),
        ("unix:///var/run/docker.sock", "unix:///tmp/evil.sock", False),
        ("unix:///var/run/docker.sock", "https://engine:2376", False),
        ("tcp://engine", "https://engine:2376", True),
        ("tcp://engine", "http://engine:2375", True),
        ("tcp://engine", "https://engine:2377", False),
        ("tcp://engine:2377", "https://engine:2377", True),
        ("tcp://ENGINE", "https://engine:2376", True),
        ("https://engine", "https://engine:2376", True),
        ("https://engine", "http://engine:2375", False),
        ("http://engine", "https://engine:2376", False),
        ("https://*.example.org", "https://a.example.org:2376", True),
        ("https://*.example.org", "https://example.org.evil.com:2376", False),
        ("https://engine:*", "https://engine:9999", True),
        ("tcp://[::1]:2376", "https://[::1]:2376", True),
        ("tcp://engine", "unix:///engine", False),
    ],
)
def test_an_engine_is_one_of_those_that_are_allowed_or_not(
    pattern: str, url: str, allowed: bool
) -> None:
    """A1"""
    rules = policy(engine_hosts=[pattern]).engines
    if allowed:
        check_engine(rules, url, "a test")
    else:
        with pytest.raises(SandboxSpecRejectedError, match="chosen by a test") as caught:
            check_engine(rules, url, "a test")
        assert (caught.value.setting, caught.value.value) == ("host", url)
        assert FILE in str(caught.value)


# -- consent to the network -----------------------------------------------------------------------

CELL = "0f" * 32
NOW = datetime(2031, 5, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("entry", "consents"),
    [
        ({"cell_sha256": CELL}, True),
        ({"cell_sha256": CELL.upper()}, True),
        ({"cell_sha256": "1f" * 32}, False),
        ({"cell_sha256": CELL, "notebook": "/srv/nb/a.ipynb"}, True),
        ({"cell_sha256": CELL, "notebook": "/srv/nb/*"}, True),
        ({"cell_sha256": CELL, "notebook": "/srv/other/*"}, False),
        ({"cell_sha256": CELL, "until": "2031-05-02"}, True),
        ({"cell_sha256": CELL, "until": "2031-05-01T00:00:00Z"}, False),
        ({"cell_sha256": CELL, "until": "2031-05-01T01:00:00+02:00"}, False),
    ],
)
def test_a_cell_may_have_a_network_where_nobody_can_be_asked(
    entry: dict[str, str], consents: bool
) -> None:
    """C5: this very cell, in this notebook, until then."""
    rules = policy(network_consents=[entry])
    assert (rules.consent(CELL, "/srv/nb/a.ipynb", NOW) is not None) is consents


def test_nobody_consents_for_themselves() -> None:
    """C5: a file that its reader can change consents to nothing, and each file must consent."""
    content = json.dumps({"network_consents": [{"cell_sha256": CELL}]})
    own = parse_policy(content, "/home/a/policy.json")
    system = parse_policy(content, FILE, binding=True)
    silent = parse_policy("{}", "/usr/local/policy.json", binding=True)
    assert Policy().consent(CELL, "", NOW) is None
    assert Policy((own,)).consent(CELL, "", NOW) is None
    assert Policy((own, system)).consent(CELL, "", NOW) is not None
    assert Policy((system, silent)).consent(CELL, "", NOW) is None


# -- reading one ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"imagess": []}, "imagess"),
        ({"caps": {"memory": {"max": 1}}}, "caps.memory"),
        ({"caps": {"mem_limit": {"maximum": 1}}}, "caps.mem_limit.maximum"),
        ({"caps": {"mem_limit": "4G"}}, "caps.mem_limit"),
        ({"caps": {"mem_limit": {"max": "lots"}}}, "caps.mem_limit.max"),
        ({"caps": {"mem_limit": {"max": None}}}, "caps.mem_limit.max"),
        ({"caps": {"mem_limit": {"max": 0}}}, "caps.mem_limit.max"),
        ({"caps": {"mem_limit": {"max": -1}}}, "caps.mem_limit.max"),
        ({"caps": {"mem_limit": {"max": True}}}, "caps.mem_limit.max"),
        ({"caps": {"cpu_limit": {"max": "2"}}}, "caps.cpu_limit.max"),
        ({"caps": {"cpu_limit": {"max": 1, "default": 2}}}, "caps.cpu_limit.default"),
        ({"caps": []}, "caps"),
        ({"images": "a"}, "images"),
        ({"images": [1]}, "images[0]"),
        ({"images": ["a", ""]}, "images[1]"),
        ({"images": ["a b"]}, "images[0]"),
        ({"images": ["a@sha256:12"]}, "images[0]"),
        ({"images": ["a@sha256:1*"]}, "images[0]"),
        ({"images": None}, "images"),
        ({"allow_pull": "no"}, "allow_pull"),
        ({"allow_pull": 0}, "allow_pull"),
        ({"network": "host"}, "network"),
        ({"network": ["none"]}, "network"),
        ({"isolation": "strong"}, "isolation"),
        ({"runtimes": ["a b"]}, "runtimes[0]"),
        ({"mounts": ["/srv"]}, "mounts[0]"),
        ({"mounts": [{}]}, "mounts[0].path"),
        ({"mounts": [{"path": "srv"}]}, "mounts[0].path"),
        ({"mounts": [{"path": "/srv/../etc"}]}, "mounts[0].path"),
        ({"mounts": [{"path": "/srv", "mode": "wr"}]}, "mounts[0].mode"),
        ({"mounts": [{"path": "/srv", "writable": True}]}, "mounts[0].writable"),
        ({"max_sandboxes": -1}, "max_sandboxes"),
        ({"max_sandboxes": 1.5}, "max_sandboxes"),
        ({"max_sandboxes": "3"}, "max_sandboxes"),
        ({"forbidden_environment": ["A=B"]}, "forbidden_environment[0]"),
        ({"engine_hosts": ["engine"]}, "engine_hosts[0]"),
        ({"engine_hosts": ["ssh://engine"]}, "engine_hosts[0]"),
        ({"engine_hosts": ["tcp://engine:abc"]}, "engine_hosts[0]"),
        ({"engine_hosts": ["tcp://u:hunter2@engine"]}, "engine_hosts[0]"),
        ({"engine_hosts": ["unix://"]}, "engine_hosts[0]"),
        ({"network_consents": [{}]}, "network_consents[0].cell_sha256"),
        ({"network_consents": [{"cell_sha256": "12"}]}, "network_consents[0].cell_sha256"),
        (
            {"network_consents": [{"cell_sha256": CELL, "hosts": ["a"]}]},
            "network_consents[0].hosts",
        ),
        (
            {"network_consents": [{"cell_sha256": CELL, "until": "soon"}]},
            "network_consents[0].until",
        ),
        ({"network_consents": [{"cell_sha256": CELL, "notebook": ""}]}, "[0].notebook"),
    ],
)
def test_a_file_that_is_not_understood_to_the_last_key_is_refused_with_file_and_key(
    content: dict[str, Any], key: str
) -> None:
    """A1: a restriction that was not understood must not be dropped; values are not shown."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        parse_policy(json.dumps(content), FILE)
    assert caught.value.setting.startswith(FILE)
    assert caught.value.setting.endswith(key)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON (line 1, column 2"),
        (b"null", "not one JSON object"),
        (b"[]", "not one JSON object"),
        (b'{"images": [], "images": ["**"]}', "'images' stands in it twice"),
        (b'{"caps": {"cpu_limit": {"max": 1, "max": 9}}}', "'max' stands in it twice"),
        (b'{"max_sandboxes": Infinity}', "Infinity is no number"),
        (b'\xff{"images": []}', "not JSON in UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "not JSON"),
        (b'{"\\u001b[31m": 1}', "no such key"),
    ],
)
def test_what_is_no_policy_at_all_is_refused(content: bytes, said: str) -> None:
    """A1: hostile files included; control characters reach no terminal."""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        parse_policy(content, FILE)
    assert said in str(caught.value)
    assert FILE in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_policy_can_be_said_in_words() -> None:
    """A1, E7"""
    rules = policy(
        images=["a:1"], allow_pull=False, caps={"mem_limit": {"max": "4G", "default": "1G"}},
        network="internal", isolation="vm", runtimes=["runsc"], max_sandboxes=3,
        mounts=[{"path": "/srv"}], data_sets=["a"], devices=["gpu"], engine_hosts=["tcp://e"],
        forbidden_environment=["AWS_*"], network_consents=[{"cell_sha256": CELL}],
        allow_insecure_engine=False, require_egress_firewall=True,
    )  # fmt: skip
    said = {statement.key: statement.text for statement in statements(rules)}
    assert said["mem_limit"] == "at most 4 GiB, 1 GiB by default"
    assert said["mounts"] == "/srv (ro)"
    assert said["max_sandboxes"] == "3 for each owner"
    document = rules.documents[0]
    plain = PolicyDocument(document.source, document.binding)
    different = {
        name
        for name in PolicyDocument.__dataclass_fields__
        if getattr(document, name) != getattr(plain, name)
    }
    assert set(said) - {"mem_limit"} == different - {"caps"}


@pytest.mark.parametrize("pattern", ["r.example.org/courses/**:*", "r.example.org/*/*:*", "**"])
@pytest.mark.parametrize(
    "image",
    [
        "r.example.org/courses/../../other:1",
        "r.example.org/courses/../../0123456789ab",
        "r.example.org/./courses:1",
        "r.example.org/courses//x:1",
        "../other:1",
    ],
)
def test_a_name_that_leads_elsewhere_as_an_address_is_no_image(pattern: str, image: str) -> None:
    """A1: an engine's address would be shortened, and another image be found."""
    assert "image" in str(refusal(policy(images=[pattern]), image=image))


@pytest.mark.parametrize("pattern", ["a/../b", "a//b", "a/.b:1", "a/"])
def test_a_pattern_that_no_name_can_meet_is_refused(pattern: str) -> None:
    """A1."""
    with pytest.raises(SandboxSpecRejectedError, match="images"):
        policy(images=[pattern])
