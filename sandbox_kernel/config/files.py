"""Configuration files: ``jupyter_sandbox_config`` as Python and JSON, and drop-ins.

They lie where Jupyter's own do. In each folder the drop-ins ``jupyter_sandbox_config.d/*.json``
come first, in the order of their names, then the Python file, then the JSON file; what comes
later wins. A name that is not known is refused, and so is a file that cannot be read.

This is also the one place that knows where policy files lie.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jupyter_core import paths
from traitlets.config import Config
from traitlets.config.loader import JSONFileConfigLoader, LazyConfigValue, PyFileConfigLoader

from sandbox_kernel.config.defaults import SETTINGS, check_setting, unknown_setting
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy import Policy, load_policy
from sandbox_kernel.policy.document import closest, printable, strict_json
from sandbox_kernel.policy.files import read_regular_file

__all__ = [
    "BASE_SECTION",
    "CONFIG_NAME",
    "DOOR_SECTIONS",
    "ConfigFile",
    "config_folders",
    "load_config_files",
    "load_policy_in_force",
    "policy_folders",
]

CONFIG_NAME: Final = "jupyter_sandbox_config"

BASE_SECTION: Final = "SandboxDefaults"
DOOR_SECTIONS: Final[Mapping[str, str]] = {
    "kernel": "SandboxProvisioner",
    "magics": "SandboxMagics",
}
"""Classes under which a file can give one door other values than the rest."""

# A policy must not depend on the environment of the process, which may be the restricted
# person's. Jupyter's own list of system folders does (JUPYTER_PLATFORM_DIRS, XDG_CONFIG_DIRS).
_SYSTEM: Final = ("/etc/jupyter", "/usr/local/etc/jupyter") if os.name == "posix" else ()


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """One configuration file, read and checked."""

    path: Path
    config: Config = field(repr=False)

    def section(self, name: str) -> dict[str, Any]:
        """Return the values under a class, by the name of the setting."""
        return dict(self.config[name]) if name in self.config else {}


def config_folders() -> tuple[Path, ...]:
    """Return the folders of configuration files, the one that wins last."""
    return tuple(dict.fromkeys(Path(p) for p in reversed(paths.jupyter_config_path())))


def policy_folders() -> tuple[Path, ...]:
    """Return the folders of policy files: the system's, the environment's and the person's.

    The first ones are fixed. The others can be moved by whoever sets the environment, which
    only adds restrictions: a request must pass every file.
    """
    folders = [*_SYSTEM, *paths.SYSTEM_CONFIG_PATH, *paths.ENV_CONFIG_PATH]
    return tuple(dict.fromkeys(Path(p) for p in (*folders, paths.jupyter_config_dir())))


def load_policy_in_force() -> Policy:
    """Read the policy that holds for this process.

    Raises
    ------
    SandboxSpecRejectedError
        A policy file cannot be read, understood or trusted.
    """
    return load_policy(policy_folders())


def load_config_files(folders: Iterable[Path] | None = None) -> tuple[ConfigFile, ...]:
    """Read every configuration file that is there, the one that wins last.

    Parameters
    ----------
    folders
        Where to look, in the same order; `config_folders` by default.

    Raises
    ------
    SandboxSpecRejectedError
        A file cannot be read, or holds a name that is not known or a value of the wrong kind.
    """
    folders = config_folders() if folders is None else folders
    return tuple(_load(path) for folder in folders for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    drop_ins = folder / f"{CONFIG_NAME}.d"
    try:
        yield from sorted(path for path in drop_ins.iterdir() if path.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise _unreadable(drop_ins, error) from error
    for path in (folder / f"{CONFIG_NAME}.py", folder / f"{CONFIG_NAME}.json"):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _unreadable(path, error) from error
        yield path


def _unreadable(path: Path, error: OSError) -> SandboxSpecRejectedError:
    return SandboxSpecRejectedError(
        str(path),
        None,
        f"the configuration cannot be read ({error.strerror or error})",
        "Make it readable, or remove it.",
    )


class _StrictPython(PyFileConfigLoader):
    """Refuses to go on without a file that another one loads, which traitlets passes over."""

    def load_subconfig(self, fname: str, path: str | None = None) -> None:
        self.config.merge(type(self)(fname, path or self.path).load_config())


class _StrictJSON(JSONFileConfigLoader):
    """Refuses a key that stands twice, of which JSON silently takes the last."""

    def _read_file_as_dict(self) -> dict[str, Any]:
        return strict_json(read_regular_file(Path(self.full_filename)), self.full_filename)


def _load(path: Path) -> ConfigFile:
    try:
        # A pipe in the place of a file would be waited for without end.
        read_regular_file(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    loader = (_StrictPython if path.suffix == ".py" else _StrictJSON)(path.name, str(path.parent))
    try:
        config = loader.load_config()
    except SandboxSpecRejectedError:
        raise
    except (Exception, SystemExit) as error:
        # What went wrong is left to the cause: its text may repeat what is in the file.
        raise SandboxSpecRejectedError(
            str(path),
            None,
            f"the configuration ends with {type(error).__name__}{_line(error, path)}",
            "Correct the file.",
        ) from error
    file = ConfigFile(path, config)
    _check(file)
    return file


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def _check(file: ConfigFile) -> None:
    strict = (BASE_SECTION, *DOOR_SECTIONS.values())
    for key, section in file.config.items():
        name = printable(key)
        if not isinstance(section, Config):
            raise SandboxSpecRejectedError(
                name,
                None,
                f"a setting belongs to a class (in {file.path})",
                f"Write c.{BASE_SECTION}.{name}."
                if name in SETTINGS
                else f"Write c.{BASE_SECTION}.NAME. {closest(name, tuple(SETTINGS))}",
            )
        # The options of commands are theirs to check; a mistake there stops no kernel.
        if not section or name.endswith("App") or name in ("SandboxCommand", "Application"):
            continue
        if name not in strict:
            raise SandboxSpecRejectedError(
                name, None, f"there is no such class (in {file.path})", closest(name, strict)
            )
        for setting, value in section.items():
            shown = f"{name}.{printable(setting)}"
            if setting not in SETTINGS:
                raise unknown_setting(shown, setting, str(file.path))
            for_kernels = (BASE_SECTION, DOOR_SECTIONS["kernel"])
            if SETTINGS[setting].part == "kernel" and name not in for_kernels:
                raise SandboxSpecRejectedError(
                    shown,
                    None,
                    f"this setting is for kernels alone (in {file.path})",
                    f"Write c.{DOOR_SECTIONS['kernel']}.{setting}; what the magics have of that "
                    "name belongs to IPython's configuration.",
                )
            if value is not None and not isinstance(value, LazyConfigValue):
                check_setting(setting, value, str(file.path))
