"""``jupyter sandbox build``: the bundled Dockerfile through the engine's API (feature E6)."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from typing import Any

from traitlets import Bool, Enum, List, Unicode

from sandbox_kernel import __version__
from sandbox_kernel.app.command import ENGINE_ALIASES, ENGINE_FLAGS, SandboxCommand
from sandbox_kernel.app.display import BuildDisplay
from sandbox_kernel.app.site import SiteSettings, detect_site
from sandbox_kernel.engine.client import Engine
from sandbox_kernel.engine.endpoint import Endpoint
from sandbox_kernel.engine.images import (
    DEFAULT_IMAGE,
    ImageInfo,
    Progress,
    ProgressCallback,
    build_image,
    image_present,
    remove_image,
)
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import (
    SandboxBuildError,
    SandboxError,
    SandboxImageMissingError,
    SandboxSpecRejectedError,
)

__all__ = ["DEFAULT_BASE", "BuildApp", "BuildRequest", "build_python_image", "find_built"]

DEFAULT_BASE = "debian:bookworm-slim"
VERSION_LABEL = "io.sandbox-kernel-image.version"
TARGET_LABEL = "io.sandbox-kernel-image.target"
RECIPE_LABEL = "io.sandbox-kernel-image.recipe"

log = logging.getLogger(__name__)

_STEP_RESULT = re.compile(r"^ ---> ([0-9a-f]{12})$")
_APT_NAME = re.compile(r"[a-z0-9][a-z0-9+.:=~-]*", re.IGNORECASE)
_PIP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\[\],=<>!~*+-]*")
_NO_REGISTRY = re.compile(
    r"dial tcp|no such host|connection refused|i/o timeout|TLS handshake|x509|request canceled"
    r"|Client\.Timeout|pull access denied|manifest.*not found|network is unreachable|EOF",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build.

    Parameters
    ----------
    tag
        Name of the image; by default that of language and target.
    language
        Whose kernel: ``python`` or ``r``.
    target
        ``kernel``, or ``full`` with compilers and tools.
    base_image
        Image to start from: a Debian or Ubuntu whose Python is 3.11 or later.
    apt, pip
        Packages to install in addition.
    keep_ca
        Leave the site's certificates in the image, for sandboxes with a network.
    network
        Network of the build's commands, the engine's default if empty.
    pull
        Look for a newer base image.
    no_cache
        Run every step again.
    """

    tag: str = ""
    language: str = "python"
    target: str = "kernel"
    base_image: str = DEFAULT_BASE
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    keep_ca: bool = False
    network: str = ""
    pull: bool = False
    no_cache: bool = False

    def __post_init__(self) -> None:
        if self.language != "python":
            for option, value, only in (("target", self.target, "kernel"), ("pip", self.pip, ())):
                if value != only:
                    raise SandboxSpecRejectedError(
                        option,
                        value,
                        f"the image for {self.language} has no such thing",
                        "Leave it out, or build the image for python.",
                    )
        for name, form, values in (("apt", _APT_NAME, self.apt), ("pip", _PIP_NAME, self.pip)):
            for value in values:
                if not form.fullmatch(value):
                    raise SandboxSpecRejectedError(
                        name, value, "is not the name of a package", "Give one name an option."
                    )

    @property
    def name(self) -> str:
        """Name of the image that comes out."""
        if self.tag or (self.language, self.target) == ("python", "kernel"):
            return self.tag or DEFAULT_IMAGE
        version = "latest" if self.target == "kernel" else self.target
        return f"sandbox-kernel/{self.language}:{version}"

    @property
    def folder(self) -> Traversable:
        """The folder that holds the Dockerfile."""
        return files("sandbox_kernel.images").joinpath(self.language)

    def build_args(self) -> Mapping[str, str]:
        """Return the values for the Dockerfile's arguments."""
        values = {
            "BASE_IMAGE": self.base_image,
            "EXTRA_APT": " ".join(self.apt),
            "EXTRA_PIP": " ".join(self.pip),
            "KEEP_CA": "1" if self.keep_ca else "",
        }
        return {name: value for name, value in values.items() if value}

    def recipe(self) -> str:
        """Return a digest of what the image is made of: Dockerfile, files and arguments.

        The base image is left out: the same Debian has many names.
        """
        digest = hashlib.sha256()
        parts = [f"{n}={v}" for n, v in self.build_args().items() if n != "BASE_IMAGE"]
        digest.update(repr([self.target, sorted(parts)]).encode())
        folder = self.folder
        beside = folder.joinpath("files")
        recipe = [folder.joinpath("Dockerfile"), *(beside.iterdir() if beside.is_dir() else ())]
        for file in sorted(recipe, key=lambda file: file.name):
            if file.is_file():
                content = file.read_bytes()
                digest.update(f"{file.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()[:16]


def find_built(endpoint: Endpoint, request: BuildRequest) -> ImageInfo | None:
    """Return the image if the engine has it and it was made by this very recipe."""
    thread = EngineThread.current()

    async def look() -> ImageInfo | None:
        return await image_present(await thread.engine(endpoint), request.name)

    image = thread.run(look)
    labels = (image.config.get("Labels") or {}) if image is not None else {}
    return image if labels.get(RECIPE_LABEL) == request.recipe() else None


def build_python_image(
    endpoint: Endpoint,
    request: BuildRequest,
    site: SiteSettings,
    progress: ProgressCallback | None = None,
) -> ImageInfo:
    """Build an image that this package ships; blocks until it is there.

    Raises
    ------
    SandboxBuildError
        A step failed, or the base image cannot be had.
    """
    if request.keep_ca and site.ca_bundle is None:
        raise SandboxSpecRejectedError(
            "keep_ca", True, "there are no certificates to keep", "Add --ca-bundle FILE."
        )
    thread = EngineThread.current()
    steps: list[str] = []

    def hear(news: Progress) -> None:
        if made := _STEP_RESULT.match(news.text.rstrip()):
            steps.append(made[1])
        if progress is not None:
            progress(news)

    async def build() -> ImageInfo:
        engine = await thread.engine(endpoint)
        before = await image_present(engine, request.name)
        with as_file(request.folder) as context:
            built = await build_image(
                engine,
                context,
                tag=request.name,
                target=request.target,
                build_args=request.build_args(),
                labels={VERSION_LABEL: __version__, RECIPE_LABEL: request.recipe()},
                extra_files=site.files(),
                network=request.network or None,
                pull=request.pull,
                no_cache=request.no_cache,
                progress=hear,
            )
        if before is not None and before.id != built.id:
            await _remove_unless_named(engine, before.id)
        return built

    try:
        return thread.run(build)
    except SandboxBuildError as error:
        raise _with_remedy(error, request) from error
    finally:
        if steps:
            thread.run(_remove_stages, endpoint, steps)


async def _remove_stages(endpoint: Endpoint, steps: Sequence[str]) -> None:
    """Remove what the image was copied from: it is larger, and holds the site's settings."""
    engine = await EngineThread.current().engine(endpoint)
    for step in reversed(steps):
        # Takes those that it was built on along, up to the base image.
        await _remove_unless_named(engine, step, label="stage")


async def _remove_unless_named(engine: Engine, ref: str, label: str = "") -> None:
    try:
        image = await image_present(engine, ref)
        if image is None or image.tags:
            return
        labels = image.config.get("Labels") or {}
        if not label or labels.get(TARGET_LABEL) == label:
            await remove_image(engine, image.id)
    except SandboxError as error:
        # A container runs it, or another build goes on from it.
        log.debug("the image %s was not removed: %s", ref, error)


def _with_remedy(error: SandboxBuildError, request: BuildRequest) -> SandboxBuildError:
    text = str(error)
    started = "kernel-root" in text and "COPY" not in text and "RUN" not in text
    if started and _NO_REGISTRY.search(text):
        return SandboxBuildError(
            f"{text}\nThe base image {request.base_image} cannot be had from a registry. Make one "
            "from this machine's apt sources with scripts/make-base-image (in the source "
            "repository), or load one with `docker load`, and name it with --base-image."
        )
    if re.search(r"Temporary failure|Could not resolve|Name or service not known", text):
        return SandboxBuildError(
            f"{text}\nThe build's commands reach no name server. If this machine does, add "
            "--network-host."
        )
    if re.search(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed", text):
        return SandboxBuildError(
            f"{text}\nThe package index has a certificate that the build does not trust. If your "
            "site has an intercepting proxy, add --ca-bundle FILE."
        )
    return SandboxBuildError(text)


_ALIASES: dict[Any, Any] = {
    **ENGINE_ALIASES,
    "tag": ("BuildApp.tag", f"Name of the image (default: {DEFAULT_IMAGE})."),
    "language": ("BuildApp.language", "Whose kernel the image holds: python (default) or r."),
    "target": ("BuildApp.target", "kernel, or full with compilers, git, Node.js and tools."),
    "base-image": ("BuildApp.base_image", f"Image to start from (default: {DEFAULT_BASE})."),
    "apt": ("BuildApp.apt", "A Debian package in addition; may be repeated."),
    "pip": ("BuildApp.pip", "A Python package in addition; may be repeated."),
    "ca-bundle": (
        "BuildApp.ca_bundle",
        "Certificates to trust in the build; 'none' for none. Default: those of pip here.",
    ),
    "pip-index-url": ("BuildApp.pip_index_url", "Package index. Default: that of pip here."),
    "pip-extra-index-url": (
        "BuildApp.pip_extra_index_url",
        "A further package index; may be repeated.",
    ),
}

_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    "keep-ca": (
        {"BuildApp": {"keep_ca": True}},
        "Leave the certificates in the image, so that sandboxes trust them too.",
    ),
    "network-host": (
        {"BuildApp": {"network_host": True}},
        "Use the engine machine's own network for the build's downloads.",
    ),
    "pull": ({"BuildApp": {"pull": True}}, "Look for a newer base image."),
    "if-changed": (
        {"BuildApp": {"if_changed": True}},
        "Build only if the engine does not have the image that would come out.",
    ),
    "check": (
        {"BuildApp": {"check": True}},
        "Build nothing; exit code 0 if the image is there and up to date, else 1.",
    ),
    "no-cache": ({"BuildApp": {"no_cache": True}}, "Run every step again."),
    "verbose": ({"BuildApp": {"verbose": True}}, "Show the whole output of the build."),
}


_EXAMPLES = """\
jupyter sandbox build
jupyter sandbox build --pip scikit-learn --pip 'polars>=1' --apt ffmpeg
jupyter sandbox build --target full
jupyter sandbox build --language r --apt r-cran-dplyr
jupyter sandbox build --base-image sandbox-kernel/base:bookworm    # without a registry
jupyter sandbox build --ca-bundle corporate.pem --pip-index-url https://pypi.example.org/simple
"""


class BuildApp(SandboxCommand):
    """``jupyter sandbox build``."""

    name = "jupyter-sandbox-build"
    description = """Build the image that sandboxes run from.

    The Dockerfile comes with this package; the engine does the work. Package index, proxies and
    certificates that this machine uses are used in the build as well, and are not left in the
    image."""
    examples = _EXAMPLES

    aliases = _ALIASES
    flags = _FLAGS

    tag = Unicode("", help="Name of the image. Since 0.1.").tag(config=True)
    language = Enum(["python", "r"], "python", help="Whose kernel the image holds. Since 0.2.").tag(
        config=True
    )
    target = Enum(
        ["kernel", "full"], "kernel", help="Stage of the Dockerfile to build. Since 0.1."
    ).tag(config=True)
    base_image = Unicode(
        DEFAULT_BASE, help="Image to start from, a Debian or Ubuntu. Since 0.1."
    ).tag(config=True)
    apt = List(Unicode(), help="Debian packages in addition. Since 0.1.").tag(config=True)
    pip = List(Unicode(), help="Python packages in addition. Since 0.1.").tag(config=True)
    ca_bundle = Unicode("", help="Certificates to trust in the build. Since 0.1.").tag(config=True)
    pip_index_url = Unicode("", help="Package index. Since 0.1.").tag(config=True)
    pip_extra_index_url = List(Unicode(), help="Further package indexes. Since 0.1.").tag(
        config=True
    )
    keep_ca = Bool(False, help="Leave the certificates in the image. Since 0.1.").tag(config=True)
    network_host = Bool(False, help="Build with the network of the host. Since 0.1.").tag(
        config=True
    )
    pull = Bool(False, help="Look for a newer base image. Since 0.1.").tag(config=True)
    if_changed = Bool(False, help="Build only what is not there yet. Since 0.1.").tag(config=True)
    check = Bool(False, help="Only look whether the image is up to date. Since 0.1.").tag(
        config=True
    )
    no_cache = Bool(False, help="Run every step again. Since 0.1.").tag(config=True)
    verbose = Bool(False, help="Show the whole output of the build. Since 0.1.").tag(config=True)

    def run(self) -> int:
        """Build, show progress, say what came out."""
        request = BuildRequest(
            tag=self.tag,
            language=self.language,
            target=self.target,
            base_image=self.base_image,
            apt=tuple(self.apt),
            pip=tuple(self.pip),
            keep_ca=self.keep_ca,
            network="host" if self.network_host else "",
            pull=self.pull,
            no_cache=self.no_cache,
        )
        endpoint = self.endpoint()
        started = time.monotonic()
        image = find_built(endpoint, request) if self.if_changed or self.check else None
        if image is not None:
            self._tell(request, image, "{name} ({size:.0f} MB) is there and up to date.", 0.0)
            return 0
        if self.check:
            raise SandboxImageMissingError(
                f"{request.name} is not on the engine, or was built from something else. "
                "Run: jupyter sandbox build"
            )
        site = detect_site(
            os.environ,
            ca_bundle=self.ca_bundle,
            index_url=self.pip_index_url,
            extra_index_urls=tuple(self.pip_extra_index_url),
        )
        with BuildDisplay(self.err, request.name, verbose=self.verbose) as display:
            image = build_python_image(endpoint, request, site, display)
        seconds = time.monotonic() - started
        self._tell(request, image, "Built {name} ({size:.0f} MB) in {seconds:.0f} s.", seconds)
        return 0

    def _tell(self, request: BuildRequest, image: ImageInfo, text: str, seconds: float) -> None:
        if self.json_output:
            record = {
                "ok": True,
                "built": bool(seconds),
                "image": request.name,
                "id": image.id,
                "size": image.size,
                "seconds": round(seconds, 1),
            }
            self.print_json(record)
        else:
            shown = text.format(name=request.name, size=image.size / 1e6, seconds=seconds)
            self.out.print(shown, markup=False)
