"""Kernelspecs of sandboxed kernels: what is written, where, and which ones are there (K1).

The command of the spec names a program that only the image has. A client that does not know
kernel provisioners would run the command on the machine itself: it then finds no such
program. The command does not name ``ipykernel`` either, so that not even a client which puts
a Python of its own in the first place starts a kernel outside of a sandbox.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager

from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError

__all__ = [
    "DEFAULT_DISPLAY_NAME",
    "DEFAULT_NAME",
    "PROVISIONER",
    "InstalledSpec",
    "KernelRequest",
    "install_kernelspec",
    "installed_specs",
]

PROVISIONER = "sandbox-provisioner"
DEFAULT_NAME = "sandbox-python"
DEFAULT_DISPLAY_NAME = "Python 3 (sandbox)"
COMMAND = ("/opt/sandbox-kernel/bin/sandboxed-ipykernel", "-f", "{connection_file}")

R_COMMAND = ("/opt/sandbox-kernel/bin/sandboxed-irkernel", "{connection_file}")
"""The command of the image that ``jupyter sandbox build --language r`` makes."""

_LOGOS = ("logo-32x32.png", "logo-64x64.png", "logo-svg.svg")
_NAME = re.compile(r"[a-z0-9._-]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """A kernelspec to write.

    Parameters
    ----------
    name, display_name
        Names for programs and for people.
    config
        Values for the provisioner's traits, only those that differ from its defaults.
    encryption
        Whether the kernel in the image can encrypt its channels.
    argv
        The kernel's command in the image; ``{connection_file}`` in one of its words is replaced.
    language
        Its language, as frontends call it.
    interrupt_mode
        ``message`` where the kernel understands interrupt requests, else ``signal``.
    debugger
        Whether the kernel has one.
    """

    name: str = DEFAULT_NAME
    display_name: str = DEFAULT_DISPLAY_NAME
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    encryption: bool = True
    argv: tuple[str, ...] = COMMAND
    language: str = "python"
    interrupt_mode: str = "message"
    debugger: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SandboxSpecRejectedError(
                "name",
                self.name,
                "is not a name for a kernel",
                "Use ASCII letters, digits, '-', '.' and '_'.",
            )
        if not self.display_name.strip():
            raise SandboxSpecRejectedError(
                "display_name", self.display_name, "is empty", "Give the name that people see."
            )
        if not any("{connection_file}" in word for word in self.argv[1:]):
            raise SandboxSpecRejectedError(
                "argv",
                list(self.argv),
                "the kernel would not be told where to listen",
                "Add the word {connection_file} where the kernel expects that file's name.",
            )

    def document(self) -> dict[str, Any]:
        """Return the content of ``kernel.json``."""
        metadata: dict[str, Any] = {
            "debugger": self.debugger,
            "kernel_provisioner": {
                "provisioner_name": PROVISIONER,
                "config": dict(self.config),
            },
        }
        if self.encryption:
            metadata["supported_encryption"] = ["curve"]
        return {
            "argv": list(self.argv),
            "display_name": self.display_name,
            "language": self.language,
            "interrupt_mode": self.interrupt_mode,
            "env": {},
            "metadata": metadata,
        }


@dataclass(frozen=True, slots=True)
class InstalledSpec:
    """A sandboxed kernel that Jupyter knows."""

    name: str
    display_name: str
    folder: str
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)


def install_kernelspec(
    request: KernelRequest, *, user: bool = False, prefix: str | None = None
) -> Path:
    """Write a kernelspec, replacing one of the same name that is ours.

    Parameters
    ----------
    request
        What to write.
    user
        Into the person's own Jupyter folder.
    prefix
        Into ``share/jupyter`` below this folder; neither means: into the system's folder.

    Returns
    -------
    The folder that was written.

    Raises
    ------
    SandboxSpecRejectedError
        The name is that of a kernel which is not ours.
    SandboxError
        The folder cannot be written.
    """
    manager = KernelSpecManager()
    # What there is to say, the caller says.
    manager.log = logging.getLogger(__name__)
    with tempfile.TemporaryDirectory(prefix="sandbox-kernelspec-") as made:
        source = Path(made)
        text = json.dumps(request.document(), indent=1) + "\n"
        (source / "kernel.json").write_text(text, encoding="utf-8")
        for logo in _LOGOS if request.language == "python" else ():
            content = files("sandbox_kernel.kernel").joinpath("logos", logo).read_bytes()
            (source / logo).write_bytes(content)
        target = Path(manager._get_destination_dir(request.name.lower(), user=user, prefix=prefix))
        if (target / "kernel.json").exists() and not _is_ours(target):
            raise SandboxSpecRejectedError(
                "name",
                request.name,
                f"is the name of another kernel, in {target}",
                "Choose another --name, or remove that kernel with `jupyter kernelspec remove`.",
            )
        try:
            written = manager.install_kernel_spec(
                str(source), kernel_name=request.name, user=user, prefix=prefix
            )
        except OSError as error:
            raise SandboxError(
                f"The kernel cannot be written to {target}: {error.strerror}. "
                "Add --user or --prefix."
            ) from error
    return Path(written)


def default_location() -> Mapping[str, Any]:
    """Say where a kernelspec goes when nothing was asked for.

    Into the environment that runs this when that is one of its own (venv, conda), because the
    provisioner is found there; else into the person's folder, which needs no rights.
    """
    environment = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    return {"prefix": sys.prefix} if environment else {"user": True}


def installed_specs() -> list[InstalledSpec]:
    """Return the sandboxed kernels that Jupyter finds from here."""
    found = []
    for name, folder in sorted(KernelSpecManager().find_kernel_specs().items()):
        document = _read(Path(folder))
        provisioner = _provisioner(document)
        if provisioner.get("provisioner_name") == PROVISIONER:
            found.append(
                InstalledSpec(
                    name,
                    str(document.get("display_name") or name),
                    str(folder),
                    provisioner.get("config") or {},
                )
            )
    return found


def _read(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _provisioner(document: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = document.get("metadata")
    entry = metadata.get("kernel_provisioner") if isinstance(metadata, dict) else None
    return entry if isinstance(entry, dict) else {}


def _is_ours(folder: Path) -> bool:
    return _provisioner(_read(folder)).get("provisioner_name") == PROVISIONER
