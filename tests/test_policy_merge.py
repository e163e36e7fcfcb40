"""Several policy files together are the strictest of them, whatever they say (A1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sandbox_kernel.config import SETTINGS, resolve
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Decision, Policy, check_engine, parse_policy

BUILT_IN = {name: setting.built_in for name, setting in SETTINGS.items()}

IMAGES = ["a:1", "a:*", "b/*:*", "**", "c@*"]
HOSTS = ["unix:///a.sock", "unix:///*.sock", "tcp://e", "https://e"]
WORDS = ["x", "y", "x*", "*"]
AMOUNTS = {
    "mem_limit": st.integers(1 << 20, 8 << 30),
    "tmpfs_size": st.integers(1 << 20, 1 << 30),
    "cpu_limit": st.floats(0.1, 8),
    "pids_limit": st.integers(1, 1000),
    "max_lifetime": st.integers(1, 10_000),
    "timeout": st.integers(1, 5000),
}


def some(values: list[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(values), max_size=3, unique=True)


def cap(amounts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.tuples(amounts, amounts).map(sorted)
    return st.one_of(
        pairs.map(lambda pair: {"max": pair[1], "default": pair[0]}),
        amounts.map(lambda amount: {"max": amount}),
        amounts.map(lambda amount: {"default": amount}),
    )


contents = st.fixed_dictionaries(
    {},
    optional={
        "images": some(IMAGES),
        "allow_pull": st.booleans(),
        "allow_insecure_engine": st.booleans(),
        "require_egress_firewall": st.booleans(),
        "caps": st.fixed_dictionaries({}, optional={n: cap(a) for n, a in AMOUNTS.items()}),
        "network": st.sampled_from(["none", "internal", "egress"]),
        "isolation": st.sampled_from(["container", "vm"]),
        "runtimes": some(WORDS),
        "mounts": st.lists(
            st.fixed_dictionaries(
                {
                    "path": st.sampled_from(["/", "/a", "/a/b"]),
                    "mode": st.sampled_from(["ro", "rw"]),
                }
            ),
            max_size=2,
        ),
        "data_sets": some(WORDS),
        "devices": some(WORDS),
        "max_sandboxes": st.integers(0, 5),
        "forbidden_environment": some(WORDS),
        "engine_hosts": some(HOSTS),
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "image": st.sampled_from(["a:1", "a:2", "b/c:1", "c@sha256:" + "ab" * 32, "abc"]),
        "pull_policy": st.sampled_from(["never", "missing"]),
        "allow_insecure_engine": st.booleans(),
        "require_egress_firewall": st.booleans(),
        "network": st.sampled_from(["none", "internal", "egress"]),
        "isolation": st.sampled_from(["container", "vm"]),
        "runtime": st.sampled_from(["x", "xy", "y"]),
        "mounts": st.dictionaries(
            st.sampled_from(["m", "n"]),
            st.sampled_from(["/", "/a", "/a:rw", "/a/b", "/ab:rw"]),
            max_size=2,
        ),
        "data_sets": st.dictionaries(
            st.sampled_from(["m", "n"]), st.sampled_from(["x", "xy", "y"]), max_size=2
        ),
        "devices": st.lists(st.sampled_from(["x", "xy", "y"]), max_size=2),
        "environment": st.lists(st.sampled_from(["x", "XY", "y"]), max_size=2),
        **AMOUNTS,
        "max_timeout": st.integers(1, 5000),
    },
)
policies = st.builds(
    lambda content, name: Policy((_parse(content, name),)), contents, st.sampled_from("abc")
)


def _parse(content: Mapping[str, Any], name: str) -> Any:
    return parse_policy(json.dumps(content), f"/etc/{name}.json", binding=True)


def judge(policy: Policy, request: Mapping[str, Any]) -> Decision | None:
    try:
        return policy.judge(request, built_in=BUILT_IN)
    except SandboxSpecRejectedError:
        return None


def outcome(policy: Policy, request: Mapping[str, Any]) -> Any:
    decision = judge(policy, request)
    if decision is None:
        return None
    quota = None if decision.quota is None else decision.quota.most
    return {name: filling.value for name, filling in decision.filled.items()}, quota


@given(policies, policies, requests)
def test_the_order_of_two_policies_does_not_matter(
    a: Policy, b: Policy, request: dict[str, Any]
) -> None:
    assert a.merge(b) == b.merge(a)
    assert outcome(a.merge(b), request) == outcome(b.merge(a), request)


@given(policies, policies, policies)
def test_the_grouping_of_three_policies_does_not_matter(a: Policy, b: Policy, c: Policy) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))


@given(policies)
def test_a_policy_merged_with_itself_is_itself(a: Policy) -> None:
    assert a.merge(a) == a
    assert a.merge(Policy()) == a


@given(policies, policies, requests)
def test_what_both_together_allow_each_of_them_allows(
    a: Policy, b: Policy, request: dict[str, Any]
) -> None:
    """Never looser than either, in what is allowed, what is filled in, and how many."""
    both = judge(a.merge(b), request)
    if both is None:
        return
    whole = {**request, **{name: filling.value for name, filling in both.filled.items()}}
    for one in (a, b):
        alone = judge(one, whole)
        assert alone is not None
        assert alone.filled == {}
        if one.quota is not None:
            assert both.quota is not None
            assert both.quota.most <= one.quota.most
        assert set(one.engines) <= set(both.engines)


@given(policies, policies, requests)
def test_what_either_refuses_both_together_refuse(
    a: Policy, b: Policy, request: dict[str, Any]
) -> None:
    for one in (a, b):
        # What a policy fills in may be refused by the other one; what was asked for is refused
        # by whoever refuses it.
        asked = [
            error.setting
            for error in one.refusals(request, built_in=BUILT_IN)
            if error.setting in request
        ]
        if asked:
            assert judge(a.merge(b), request) is None


@given(policies, policies, st.sampled_from(["unix:///a.sock", "unix:///b.sock", "https://e:2376"]))
def test_an_engine_must_be_allowed_by_both(a: Policy, b: Policy, url: str) -> None:
    def allowed(policy: Policy) -> bool:
        try:
            check_engine(policy.engines, url, "")
        except SandboxSpecRejectedError:
            return False
        return True

    assert allowed(a.merge(b)) == (allowed(a) and allowed(b))


@given(policies, requests)
def test_whatever_is_settled_obeys_the_policy_and_whatever_is_refused_names_a_file(
    a: Policy, request: dict[str, Any]
) -> None:
    """Through the whole configuration, as every door does it."""
    asked = {**request, "environment": dict.fromkeys(request.get("environment", ()), "")}
    try:
        resolved = resolve(asked, environ={}, files=(), policy=a)
    except SandboxSpecRejectedError as error:
        refused = error
    else:
        settled = {name: e.value for name, e in resolved.settings.items() if e.value is not None}
        assert judge(a, {**settled, **resolved.further}) is not None
        assert resolved["timeout"] <= resolved["max_timeout"]
        for name in request.keys() & SETTINGS.keys() - {"environment"}:
            assert resolved[name] == request[name]
        return
    assert "/etc/" in str(refused) or "max_timeout" in str(refused)
