"""``jupyter sandbox build`` and the Dockerfile that it sends (E6)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files

import pytest

from sandbox_kernel.app.build import BuildRequest
from sandbox_kernel.app.display import plain
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.images import DEFAULT_IMAGE
from sandbox_kernel.errors import SandboxSpecRejectedError
from tests.app.conftest import CommandLine
from tests.engines import Engines

DOCKERFILE = files("sandbox_kernel.images.python").joinpath("Dockerfile").read_text()


# Runs a shell script in the image, as the user of the code by default.
Look = Callable[..., Awaitable[str]]


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def stage_images(engines: Engines) -> set[str]:
    """What the engine keeps of the stages that targets are copied from."""
    label = "io.sandbox-kernel-image.target=stage"
    return {i["Id"] for i in engines.api.get("/images/json", all=1, filters={"label": [label]})}


@pytest.mark.parametrize("value", ["two words", "$(id)", "-e", "--index-url=x", "a;b", "a\nb", ""])
@pytest.mark.parametrize("kind", ["apt", "pip"])
def test_what_is_not_the_name_of_a_package_is_refused(kind: str, value: str) -> None:
    """E6"""
    with pytest.raises(SandboxSpecRejectedError) as caught:
        BuildRequest(**{kind: (value,)})
    assert caught.value.setting == kind


@pytest.mark.parametrize(
    "value", ["numpy", "polars>=1", "pandas[excel]==2.*", "a.b_c-d~=1.0,!=1.1"]
)
def test_requirements_of_pip_are_accepted(value: str) -> None:
    """E6"""
    assert BuildRequest(pip=(value,)).build_args()["EXTRA_PIP"] == value


def test_languages_have_images_of_their_own() -> None:
    """K2, E6"""
    assert BuildRequest(language="r").name == "sandbox-kernel/r:latest"
    assert BuildRequest(language="r").recipe() != BuildRequest().recipe()
    for more in ({"pip": ("numpy",)}, {"target": "full"}):
        with pytest.raises(SandboxSpecRejectedError, match="image for r"):
            BuildRequest(language="r", **more)


def test_the_recipe_tells_images_apart_but_not_base_images() -> None:
    """E6"""
    plain_one = BuildRequest().recipe()
    assert BuildRequest(base_image="other:1").recipe() == plain_one
    assert BuildRequest(pip=("polars",)).recipe() != plain_one
    assert BuildRequest(target="full").recipe() != plain_one
    assert BuildRequest(pip=("a", "b")).recipe() != BuildRequest(apt=("a", "b")).recipe()


def test_no_target_takes_an_argument_or_a_file_of_the_site() -> None:
    """E6: what a target's history could show is nothing of the site."""
    for name in ("kernel", "full"):
        body = stages()[name]
        assert "ARG" not in body
        assert "site" not in body
        assert f"COPY --from={name}-root / /" in body


def test_no_address_of_a_mirror_is_in_the_dockerfile() -> None:
    """E6"""
    assert not re.search(r"(https?|ftp|file)://", DOCKERFILE)


def test_a_base_image_that_cannot_be_had_gives_the_ways_out(
    cli: CommandLine, engines: Engines
) -> None:
    """E6"""
    base = "sandbox-kernel-test/no-such-base:1"
    done = cli("build", f"--engine={engines.unix}", f"--base-image={base}", "--tag=sbxtest:x")
    assert done.code == 1
    assert base in done.err
    assert "scripts/make-base-image" in done.err
    assert engines.api.image("sbxtest:x") is None


def test_a_step_that_fails_is_shown_with_its_last_lines(
    cli: CommandLine, engines: Engines, busybox_image: str
) -> None:
    """E6"""
    before = stage_images(engines)
    done = cli(
        "build", "--json", f"--engine={engines.unix}",
        f"--base-image={busybox_image}", "--tag=sandbox-kernel-test/broken:1",
    )  # fmt: skip
    assert done.code == 1
    answer = done.json()
    assert answer["error"]["type"] == "SandboxBuildError"
    assert "apt-get" in answer["error"]["text"]
    assert engines.api.image("sandbox-kernel-test/broken:1") is None
    assert stage_images(engines) <= before


def test_an_image_that_is_up_to_date_is_not_built_again(cli: CommandLine, engines: Engines) -> None:
    """E6"""
    done = cli("build", "--if-changed", "--json", f"--engine={engines.unix}", timeout=20)
    answer = done.json()
    assert (done.code, answer["built"], answer["image"]) == (0, False, DEFAULT_IMAGE)


def test_a_check_says_that_an_image_would_have_to_be_built(
    cli: CommandLine, engines: Engines
) -> None:
    """E6"""
    done = cli("build", "--check", "--pip=polars", f"--engine={engines.unix}", timeout=20)
    assert done.code == 1
    assert "jupyter sandbox build" in done.err


def test_certificates_can_only_be_kept_where_there_are_some(
    cli: CommandLine, engines: Engines
) -> None:
    """E6"""
    done = cli("build", "--keep-ca", "--ca-bundle=none", f"--engine={engines.unix}")
    assert done.code == 1
    assert "--ca-bundle" in done.err


def test_escape_sequences_of_a_build_do_not_reach_the_terminal() -> None:
    assert plain("\x1b[91mred\x1b[0m\x07 and \x1b]0;title\x07plain") == "red and ]0;titleplain"


# -- the image ----------------------------------------------------------------------------------


@pytest.fixture
async def look(engines: Engines, run_labels: dict[str, str]) -> AsyncIterator[Look]:
    async with Engine(engines.unix_endpoint) as engine:
        body = {
            "Image": DEFAULT_IMAGE,
            "Cmd": ["sleep", "60"],
            "Labels": run_labels,
            "HostConfig": {
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "AutoRemove": True,
                "Tmpfs": {"/tmp": "mode=1777", "/home/sbx": "uid=10001,gid=10001"},
            },
        }
        container = (await engine.create_container(None, body)).id
        try:
            await engine.start_container(container)

            async def run(script: str, user: str = "10001:10001") -> str:
                stream = await engine.exec(container, ["sh", "-c", script], user=user, stdin=False)
                out = b""
                async with stream:
                    while chunk := await stream.read():
                        out += chunk.data
                return out.decode()

            yield run
        finally:
            await engine.remove_container(container)


async def test_the_image_keeps_its_contract(look: Look) -> None:
    """E6: users, folders and the command that the kernelspec names."""
    assert (await look("id")) == "uid=10001(sandbox) gid=10001(sandbox) groups=10001(sandbox)\n"
    assert "control" in await look("id", user="10002:10002")
    assert (await look("stat -c '%u %g %a' /workspace")) == "10001 10001 755\n"
    assert (await look("command -v python3")) == "/opt/python/bin/python3\n"
    assert (
        await look("test -x /opt/sandbox-kernel/bin/sandboxed-ipykernel && echo yes")
    ) == "yes\n"
    packages = "ipykernel, numpy, pandas, matplotlib, ipywidgets, comm, debugpy"
    assert (await look(f"python3 -c 'import {packages}; print(1)'")) == "1\n"


async def test_the_image_holds_no_set_user_id_program_and_nothing_of_the_site(look: Look) -> None:
    """E6, B1"""
    assert (await look("find / -xdev -perm /6000 -type f 2>/dev/null", user="0:0")) == ""
    assert (await look("ls /run/site /var/lib/apt/lists /root/.cache 2>/dev/null", user="0:0")) in {
        "/var/lib/apt/lists:\n",
        "",
    }


async def test_everything_is_compiled_since_nothing_can_be_written_at_run_time(
    look: Look,
) -> None:
    """E6"""
    # A module that has to be compiled is reported by its .py, one that is ready by its .pyc.
    said = await look("python3 -v -c 'import ipykernel.kernelapp, pandas' 2>&1")
    loaded = re.findall(r"^# code object from '(.*)'$", said, re.MULTILINE)
    assert len(loaded) > 300
    assert [path for path in loaded if not path.endswith(".pyc")] == []


async def test_the_fonts_are_listed_beforehand(look: Look) -> None:
    """E6"""
    assert "fontlist" in await look("ls /opt/sandbox-kernel/matplotlib")


async def test_the_command_of_the_kernelspec_starts_ipykernel(look: Look) -> None:
    """K1"""
    command = "/opt/sandbox-kernel/bin/sandboxed-ipykernel --version"
    assert re.match(r"\d+\.\d+", await look(command))
