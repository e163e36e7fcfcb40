"""Attestation: whatever the engine tells differently from the request is noticed (ESC-19)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import image_present
from sandbox_kernel.errors import SandboxAttestationError
from sandbox_kernel.sandbox.attest import CAPABILITIES, attest, canonical, differences
from sandbox_kernel.sandbox.container import container_body
from sandbox_kernel.sandbox.labels import make_labels
from sandbox_kernel.sandbox.live import LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec, resolve_limits
from tests.sandbox.conftest import marks

Pair = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture
async def pair(engine: Engine, busybox_image: str, run_labels: dict[str, str]) -> Pair:
    """A request, and the real engine's account of the container that it made of it."""
    image = await image_present(engine, busybox_image)
    assert image is not None
    spec = SandboxSpec(image=busybox_image)
    limits = resolve_limits(spec, await engine.info())
    labels = make_labels(
        owner="tester",
        created="now",
        image=busybox_image,
        network="none",
        ttl=60,
        lifetime=0,
        caller={},
        extra=marks(run_labels),
    )
    body = container_body(spec, limits, image, labels)
    created = await engine.create_container(None, body)
    try:
        inspected = await engine.inspect_container(created.id)
    finally:
        await engine.remove_container(created.id)
    assert created.warnings == ()
    return body, inspected


def test_what_the_engine_made_of_the_request_is_accepted(pair: Pair) -> None:
    attest(*pair)


def mutations(value: Any, key: str) -> Iterator[Any]:
    """Give values that mean something else than `value`."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        yield value - 1
    elif isinstance(value, str):
        yield value + "x"
        if value:
            yield ""
    elif isinstance(value, list):
        yield [*value, _example(value, key)]
        if canonical(key, value) is not None:
            yield []
            yield value[1:] or None
        for index, item in enumerate(value):
            for other in mutations(item, ""):
                yield [*value[:index], other, *value[index + 1 :]]
    elif isinstance(value, dict):
        yield {**value, "extra": "x"}
        if canonical(key, value) is not None:
            yield {}
        for name, item in value.items():
            for other in mutations(item, ""):
                if (key, name, other) != ("RestartPolicy", "Name", ""):  # means "no"
                    yield {**value, name: other}
            if item and key != "RestartPolicy":
                yield {k: v for k, v in value.items() if k != name}
    elif value is None:
        yield from (1, True, "x", ["x"], {"x": "y"})


def _example(value: list[Any], key: str) -> Any:
    if key == "Ulimits":
        return {"Name": "rtprio", "Soft": 1, "Hard": 1}
    if value and isinstance(value[0], dict):
        return {**value[0], "Target": "/extra", "Source": "/"}
    return 7 if value and isinstance(value[0], int) else "extra"


@pytest.mark.parametrize("part", ["Config", "HostConfig"])
def test_every_changed_field_is_detected(pair: Pair, part: str) -> None:
    """Security goal 2: all of them, those that were not sent included."""
    body, inspected = pair
    missed, tried = [], 0
    for key in sorted(inspected[part]):
        for other in mutations(inspected[part][key], key):
            changed = copy.deepcopy(inspected)
            changed[part][key] = other
            tried += 1
            try:
                attest(body, changed)
            except SandboxAttestationError:
                continue
            missed.append((key, other))
    assert missed == []
    assert tried > 100


@pytest.mark.parametrize("part", ["Config", "HostConfig"])
def test_every_field_that_goes_missing_is_detected(pair: Pair, part: str) -> None:
    body, inspected = pair
    wanted = body if part == "Config" else body["HostConfig"]
    for key, value in wanted.items():
        if key == "HostConfig" or canonical(key, value) is None:
            continue
        changed = copy.deepcopy(inspected)
        del changed[part][key]
        assert any(key in text for text in differences(body, changed)), key


@pytest.mark.parametrize("key", ["Unheard", "DeviceRequests2"])
def test_a_field_that_nobody_knows_is_refused_unless_it_is_empty(pair: Pair, key: str) -> None:
    body, inspected = pair
    inspected["HostConfig"][key] = None
    attest(body, inspected)
    inspected["HostConfig"][key] = ["x"]
    with pytest.raises(SandboxAttestationError, match=key):
        attest(body, inspected)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["Image"], "sha256:" + "0" * 64),
        (["Path"], "/bin/evil"),
        (["Args"], []),
        (["Mounts"], []),
        (["Mounts", 0, "RW"], False),
        (["Mounts", 0, "Type"], "bind"),
        (["Mounts", 0, "Driver"], "nfs"),
        (["Mounts", 0, "Destination"], "/"),
        (["NetworkSettings", "Networks"], {"none": {}, "bridge": {}}),
        (["State", "Running"], True),
        (["AppArmorProfile"], "unconfined"),
    ],
)
def test_what_the_engine_tells_besides_the_request_is_compared_too(
    pair: Pair, path: list[Any], value: Any
) -> None:
    body, inspected = pair
    place = inspected
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert differences(body, inspected)


def test_a_warning_refuses_the_sandbox_with_its_text(pair: Pair) -> None:
    """ESC-19."""
    warning = "Your kernel does not support memory limit capabilities. Limitation discarded."
    with pytest.raises(SandboxAttestationError, match="memory limit capabilities"):
        attest(*pair, [warning])


async def test_a_refused_container_is_removed_and_was_never_started(
    engine: Engine,
    busybox_image: str,
    run_labels: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    engines: Any,
) -> None:
    started: list[str] = []
    inspect = Engine.inspect_container

    async def weakened(self: Engine, container_id: str) -> dict[str, Any]:
        answer = await inspect(self, container_id)
        answer["HostConfig"]["ReadonlyRootfs"] = False
        return answer

    async def start(self: Engine, container_id: str) -> None:
        started.append(container_id)

    monkeypatch.setattr(Engine, "inspect_container", weakened)
    monkeypatch.setattr(Engine, "start_container", start)
    mark = "io.sandbox-kernel.test-case"
    with pytest.raises(SandboxAttestationError, match=r"HostConfig\.ReadonlyRootfs is empty"):
        await LiveSandbox.create(
            engine,
            SandboxSpec(image=busybox_image),
            owner="tester",
            extra_labels={**marks(run_labels), mark: "weakened"},
        )
    assert started == []
    assert engines.api.containers(f"{mark}=weakened") == []
    assert engines.api.volumes(f"{mark}=weakened") == []


def test_podmans_spelling_of_all_capabilities_is_understood() -> None:
    spelled = [f"CAP_{name}" for name in CAPABILITIES]
    assert canonical("CapDrop", spelled) == canonical("CapDrop", ["ALL"])
    assert canonical("CapDrop", spelled[1:]) != canonical("CapDrop", ["ALL"])
