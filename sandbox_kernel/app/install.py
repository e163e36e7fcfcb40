"""``jupyter sandbox install``: the kernelspec of the sandboxed kernel (feature K1)."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from traitlets import Bool, CaselessStrEnum, Float, Integer, List, Unicode

from sandbox_kernel.app.command import ENGINE_ALIASES, ENGINE_FLAGS, SandboxCommand
from sandbox_kernel.engine.images import (
    DEFAULT_IMAGE,
    R_IMAGE,
    ImageInfo,
    how_to_get,
    image_present,
)
from sandbox_kernel.engine.thread import EngineThread
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.kernel.kernelspec import (
    DEFAULT_DISPLAY_NAME,
    DEFAULT_NAME,
    R_COMMAND,
    KernelRequest,
    default_location,
    install_kernelspec,
)
from sandbox_kernel.sandbox.order import Order

"""What `jupyter sandbox build --language r` makes."""

_KNOWN = {
    "python": (DEFAULT_NAME, DEFAULT_DISPLAY_NAME),
    "r": ("sandbox-r", "R (sandbox)"),
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_ALIASES: dict[Any, Any] = {
    **ENGINE_ALIASES,
    "name": ("InstallApp.kernel_name", f"Name for programs (default: {DEFAULT_NAME})."),
    "display-name": (
        "InstallApp.display_name",
        f"Name for people (default: {DEFAULT_DISPLAY_NAME}).",
    ),
    "image": (
        "InstallApp.image",
        f"Image to run from, made with `jupyter sandbox build` or based on such a one "
        f"(default: the configured one, else {DEFAULT_IMAGE}).",
    ),
    "language": (
        "InstallApp.language",
        "The kernel's language: python and r run from the images of `jupyter sandbox build`; any "
        "other needs --image and --argv.",
    ),
    "argv": (
        "InstallApp.kernel_argv",
        "The kernel's command in the image, in one argument, with {connection_file} in it.",
    ),
    "interrupt-mode": (
        "InstallApp.interrupt_mode",
        "How the kernel of --argv is interrupted: signal (default) or message.",
    ),
    "mem-limit": ("InstallApp.mem_limit", "Memory, as in 512M or 2G."),
    "cpu-limit": ("InstallApp.cpu_limit", "Processors, as in 1.5."),
    "pids-limit": ("InstallApp.pids_limit", "Processes and threads."),
    "env": ("InstallApp.environment", "NAME=VALUE for the kernel; may be repeated."),
    "env-keep": (
        "InstallApp.env_keep",
        "Name of a variable to pass on from Jupyter's environment; may be repeated.",
    ),
    "workspace": (
        "InstallApp.workspace",
        "What is kept in /workspace: ephemeral (nothing), notebook, user, or a name.",
    ),
    "network": ("InstallApp.network", "none, internal or egress; see docs/network.md."),
    "files": (
        "InstallApp.files",
        "snapshot: each new workspace begins as a copy of the notebook's folder (default: none).",
    ),
    "template": ("InstallApp.template", "Folder that each new workspace begins as a copy of."),
    "project": ("InstallApp.project", "Folder whose snapshot is shown, read-only, in /project."),
    "prefix": ("InstallApp.prefix", "Install below PREFIX/share/jupyter/kernels."),
}

_FLAGS: dict[Any, Any] = {
    **ENGINE_FLAGS,
    "user": ({"InstallApp": {"user": True}}, "Install into your own Jupyter folder."),
    "sys-prefix": (
        {"InstallApp": {"prefix": sys.prefix}},
        "Install into the environment that runs this command.",
    ),
}


_EXAMPLES = """\
jupyter sandbox install
jupyter sandbox install --mem-limit 4G --cpu-limit 2
jupyter sandbox install --name sandbox-ml --display-name "Python 3 (sandbox, ML)" \\
    --image sandbox-kernel/python:ml
jupyter sandbox install --name sandbox-kept --display-name "Python 3 (sandbox, kept)" \\
    --workspace notebook
jupyter sandbox install --files snapshot
jupyter sandbox install --language r
jupyter sandbox install --language bash --name sandbox-bash --display-name "Bash (sandbox)" \\
    --image example.org/bash-kernel:1 --argv "python3 -m bash_kernel -f {connection_file}"
jupyter sandbox install --engine tcp://engine.example.org:2376 --user
"""


class InstallApp(SandboxCommand):
    """``jupyter sandbox install``."""

    name = "jupyter-sandbox-install"
    description = """Install a kernel for Jupyter that runs in a sandbox.

    It goes to the environment that runs this command (venv, conda) or, where there is none, to
    the person's own Jupyter folder."""
    examples = _EXAMPLES

    aliases = _ALIASES
    flags = _FLAGS

    kernel_name = Unicode("", help="Name for programs. Since 0.1.").tag(config=True)
    display_name = Unicode("", help="Name for people. Since 0.1.").tag(config=True)
    language = Unicode("python", help="The kernel's language. Since 0.2.").tag(config=True)
    kernel_argv = Unicode("", help="The kernel's command in the image. Since 0.2.").tag(config=True)
    interrupt_mode = CaselessStrEnum(
        ["signal", "message"], "signal", help="How the kernel is interrupted. Since 0.2."
    ).tag(config=True)
    files = CaselessStrEnum(
        ["none", "snapshot"],
        None,
        allow_none=True,
        help="Which files of the notebook's folder the kernel sees. Since 0.2.",
    ).tag(config=True)
    image = Unicode("", help="Image to run from; by default the configured one. Since 0.1.").tag(
        config=True
    )
    mem_limit = Unicode("", help="Memory, as in 2G. Since 0.1.").tag(config=True)
    cpu_limit = Float(None, allow_none=True, help="Processors. Since 0.1.").tag(config=True)
    pids_limit = Integer(None, allow_none=True, help="Processes and threads. Since 0.1.").tag(
        config=True
    )
    environment = List(Unicode(), help="NAME=VALUE for the kernel. Since 0.1.").tag(config=True)
    env_keep = List(Unicode(), help="Variables to pass on. Since 0.1.").tag(config=True)
    workspace = Unicode("", help="What is kept in /workspace. Since 0.1.").tag(config=True)
    network = Unicode("", help="The network's tier. Since 0.1.").tag(config=True)
    template = Unicode("", help="What new workspaces begin as. Since 0.1.").tag(config=True)
    project = Unicode("", help="What is shown in /project. Since 0.1.").tag(config=True)
    prefix = Unicode("", help="Install below this folder. Since 0.1.").tag(config=True)
    user = Bool(False, help="Install into the person's own folder. Since 0.1.").tag(config=True)

    def run(self) -> int:
        """Check the options, write the kernelspec, say where it is."""
        if self.user and self.prefix:
            self._usage("--user and --prefix (or --sys-prefix) exclude each other")
        self._check_language()
        config = self._config()
        # Settled as the kernel will be, so that what the policy refuses is refused now.
        order = self.settle(config, door="kernel")
        ref = order.spec.image
        image, unreachable = self._look_for_image(order)
        request = self._request(config, _can_encrypt(ref, image))
        location: dict[str, Any] = {"prefix": self.prefix or None, "user": self.user}
        if not self.user and not self.prefix:
            location = dict(default_location())
        folder = install_kernelspec(request, **location)
        if self.json_output:
            self.print_json(
                {
                    "ok": True,
                    "name": request.name,
                    "display_name": request.display_name,
                    "folder": str(folder),
                    "image": ref,
                    "image_present": None if unreachable else image is not None,
                }
            )
            return 0
        self.out.print(
            f"Installed {request.display_name!r} ({request.name}) in {folder}.", markup=False
        )
        if unreachable:
            self.err.print(f"Note: {unreachable}", markup=False)
        elif image is None:
            remedy = how_to_get(ref)
            self.err.print(f"Note: the engine does not have {ref} yet; run {remedy}.", markup=False)
        return 0

    def _request(self, config: dict[str, Any], encryption: bool) -> KernelRequest:
        """Return the kernelspec to write."""
        language = self.language.lower()
        name, display_name = _KNOWN.get(language, ("", ""))
        request = KernelRequest(
            name=self.kernel_name or name,
            display_name=self.display_name or display_name,
            config=config,
            encryption=encryption,
        )
        if language == "python" and not self.kernel_argv:
            return request
        argv = tuple(shlex.split(self.kernel_argv)) if self.kernel_argv else R_COMMAND
        return replace(
            request,
            argv=argv,
            language="R" if language == "r" else self.language,
            interrupt_mode=self.interrupt_mode,
            debugger=False,
        )

    def _check_language(self) -> None:
        """Refuse what would be a kernel that cannot start."""
        if self.language.lower() not in _KNOWN:
            for option in ("kernel_argv", "image", "kernel_name", "display_name"):
                if not getattr(self, option):
                    flag = option.removeprefix("kernel_").replace("_", "-")
                    self._usage(f"--language {self.language} needs --{flag}")
        try:
            shlex.split(self.kernel_argv)
        except ValueError as error:
            self._usage(f"--argv cannot be taken apart into words: {error}")

    def _config(self) -> dict[str, Any]:
        """Return the provisioner's configuration: only what options name."""
        config: dict[str, Any] = {}
        for name in ("image", "mem_limit", "workspace", "network"):
            if text := getattr(self, name):
                config[name] = text
        if self.language.lower() == "r":
            config.setdefault("image", R_IMAGE)
        if self.files is not None:
            config["files"] = self.files
        for name in ("template", "project"):
            if text := getattr(self, name):
                config[name] = str(self._folder(name, text))
        for name in ("cpu_limit", "pids_limit"):
            value = getattr(self, name)
            if value is not None:
                config[name] = value
        environment = dict(self._variable(text) for text in self.environment)
        for name in self.env_keep:
            if not _VARIABLE.fullmatch(name):
                raise SandboxSpecRejectedError(
                    "env_keep", name, "is not the name of a variable", "Give names only."
                )
        if environment:
            config["environment"] = environment
        if self.env_keep:
            config["env_keep"] = list(self.env_keep)
        return {**config, **self.engine_options()}

    def _folder(self, setting: str, text: str) -> Path:
        folder = self._absolute(setting, text)
        if not folder.is_dir():
            raise SandboxSpecRejectedError(
                setting, text, "is not a folder of this machine", "Give one that is there."
            )
        return folder

    @staticmethod
    def _variable(text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise SandboxSpecRejectedError(
                "environment", None, "an entry has not the form NAME=VALUE", "Write --env A=1."
            )
        return name, value

    @staticmethod
    def _look_for_image(order: Order) -> tuple[ImageInfo | None, str]:
        """Find the image, or say why that could not be done; installing needs no engine."""
        thread = EngineThread.current()

        async def look() -> ImageInfo | None:
            return await image_present(await thread.engine(order.endpoint()), order.spec.image)

        try:
            return thread.run(look), ""
        except SandboxError as error:
            return None, str(error)


def _can_encrypt(ref: str, image: ImageInfo | None) -> bool:
    """Whether the kernel in an image can encrypt its channels; ours always can."""
    if image is None:
        return ref == DEFAULT_IMAGE
    labels = image.config.get("Labels") or {}
    return labels.get("io.sandbox-kernel-image.encryption") == "curve"
