"""Names of workspaces, and which volumes are taken for one (B6; TEN-01, TEN-02, TEN-05)."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sandbox_kernel.errors import SandboxConflictError, SandboxSpecRejectedError
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.spec import KEY_LIMIT, SandboxSpec
from sandbox_kernel.sandbox.workspace import FORMAT, verified, workspace_name, workspace_of

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
ODD = ["../etc", "a/b", "a:b", ".", "..", "A" * 300, "x\n", "%2e", "İ", "-x", "a b", "{{.Name}}",
       "\0", "🧪" * 900, "ﬁ", "ﬀ", "K", "K"]  # fmt: skip
GOLDEN = {
    ("alice", "physics/Lab 1.ipynb"): "sbx-n7myahkmghe5kgzgbjkhrmvwb3",
    ("bob", "../etc"): "sbx-4pgnyk3aosqbmdhdvuh7j7ye4z",
    ("bob", "a/b"): "sbx-f6ndsqwfqxafvbo3td4tmckhvi",
    ("bob", "a:b"): "sbx-gtsnd3t7qxkvyzspfk44vog7i4",
    ("bob", "."): "sbx-un3dmwufpu6vfo7kz6u2nt3qhl",
    ("bob", "A" * 300): "sbx-iixxcjrijcx7qwxllr2bjiqea3",
    ("bob", "İ"): "sbx-3vrbpf4yjvneu4dqqluv22xbie",
}


@pytest.mark.parametrize(("pair", "name"), GOLDEN.items())
def test_a_name_never_changes(pair: tuple[str, str], name: str) -> None:
    """B6: a workspace is found again by every later version of this package."""
    assert workspace_name("sbx-", *pair) == name


@given(st.tuples(TEXT, TEXT), st.tuples(TEXT, TEXT))
def test_no_two_pairs_of_owner_and_key_share_a_name(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """K5, security goal 10."""
    assume(one != other)
    assert workspace_name("sbx-", *one) != workspace_name("sbx-", *other)


@given(TEXT, TEXT, st.integers(0, 60))
def test_where_the_owner_ends_and_the_key_begins_counts(owner: str, key: str, cut: int) -> None:
    whole = owner + key
    other = (whole[:cut], whole[cut:])
    assume(other != (owner, key) and other[1])
    assert workspace_name("sbx-", owner, key) != workspace_name("sbx-", *other)


@given(TEXT)
def test_spellings_that_look_alike_are_different_keys(key: str) -> None:
    """NFC and NFD, upper and lower case, with and without a blank."""
    forms = ("NFC", "NFD", "NFKC", "NFKD")
    spellings = {key, key.upper(), key.lower(), key.casefold(), key.strip() or key, key + " "}
    spellings |= {unicodedata.normalize(form, text) for form in forms for text in set(spellings)}
    names = {workspace_name("sbx-", "o", text) for text in spellings}
    assert len(names) == len(spellings)


@given(TEXT | st.sampled_from(ODD), TEXT | st.sampled_from(ODD))
def test_a_name_is_always_one_that_an_engine_takes_and_never_a_path(owner: str, key: str) -> None:
    """TEN-02."""
    name = workspace_name("sbx-", owner, key)
    assert NAME.fullmatch(name)
    # Neighbours on a network can look it up: it says nothing of either.
    assert re.fullmatch(r"sbx-[a-z2-7]{26}", name)


@pytest.mark.parametrize("key", ["", None, b"x", 7, "\udc80", "a" * (KEY_LIMIT + 1)])
def test_what_can_be_no_key_is_refused(key: Any) -> None:
    """TEN-02."""
    with pytest.raises(SandboxSpecRejectedError, match="workspace"):
        SandboxSpec(durability="persistent", workspace=key)


@given(TEXT | st.sampled_from(ODD))
def test_the_label_holds_the_exact_key(key: str) -> None:
    text = labels.key_text(key)
    assert text.isascii()
    assert text.isprintable()
    assert labels.workspace_key({labels.WORKSPACE: text}) == key


def volume(**changes: Any) -> dict[str, Any]:
    told = {
        labels.VERSION: "0.1.0",
        labels.OWNER: "bob",
        labels.WORKSPACE: labels.key_text("key"),
        labels.DURABILITY: "persistent",
        labels.FORMAT: FORMAT,
        labels.CREATED: "2026-01-01T00:00:00+00:00",
        labels.IMAGE: "an image",
    }
    name = workspace_name("sbx-", "bob", "key")
    plain = {"Name": name, "Driver": "local", "Options": None, "Scope": "local", "Labels": told}
    return {**plain, **changes}


def told(**changes: str | None) -> dict[str, Any]:
    now = {**volume()["Labels"], **{getattr(labels, k): v for k, v in changes.items()}}
    return volume(Labels={k: v for k, v in now.items() if v is not None})


def test_the_workspace_itself_is_accepted() -> None:
    name = workspace_name("sbx-", "bob", "key")
    for options in (None, {}, {"size": "1048576"}):
        found = verified(volume(Options=options), name=name, owner="bob", key="key")
        assert (found.owner, found.key, found.image) == ("bob", "key", "an image")
        assert workspace_of(volume(Options=options)) == found


@pytest.mark.parametrize(
    "planted",
    [
        volume(Options={"type": "none", "o": "bind", "device": "/"}),
        volume(Options={"size": "1m", "device": "/etc"}),
        volume(Driver="nfs"),
        volume(Scope="global"),
        volume(Labels=None),
        told(VERSION=None),
        told(OWNER="alice"),
        told(OWNER=None),
        told(WORKSPACE=labels.key_text("KEY")),
        told(WORKSPACE="key"),
        told(DURABILITY="ephemeral"),
        told(FORMAT="2"),
    ],
)
def test_a_volume_that_is_something_else_is_refused_by_name(planted: dict[str, Any]) -> None:
    """TEN-05: a volume can be a folder of the engine's machine."""
    name = workspace_name("sbx-", "bob", "key")
    with pytest.raises(SandboxConflictError, match=name):
        verified(planted, name=name, owner="bob", key="key")


def test_another_disk_limit_than_that_of_the_workspace_is_refused() -> None:
    """B5."""
    name = workspace_name("sbx-", "bob", "key")
    bounded = volume(Options={"size": "1048576"})
    with pytest.raises(SandboxConflictError, match="2097152"):
        verified(bounded, name=name, owner="bob", key="key", disk=2097152)
