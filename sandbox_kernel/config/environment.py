"""The environment group ``SANDBOX_DOCKER_*``: one variable for each setting that is one value.

The group is closed: a name in it that is not known is refused, since a misspelt security
setting must not be silently ignored. Values are never key material.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from traitlets import Bool, Float, Integer

from sandbox_kernel.config.defaults import SETTINGS, Setting, check_setting
from sandbox_kernel.errors import SandboxSpecRejectedError
from sandbox_kernel.policy.document import closest

__all__ = ["ENVIRONMENT_PREFIX", "VARIABLES", "read_environment"]

ENVIRONMENT_PREFIX: Final = "SANDBOX_DOCKER_"

VARIABLES: Final[Mapping[str, str]] = {
    ENVIRONMENT_PREFIX + name.upper(): name
    for name, setting in SETTINGS.items()
    if setting.in_environment
}
"""The setting of each variable."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def read_environment(environ: Mapping[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """Read the group.

    Parameters
    ----------
    environ
        The environment; the process's own by default.

    Returns
    -------
    For each setting that is there, its value and the variable. An empty variable says nothing.

    Raises
    ------
    SandboxSpecRejectedError
        A name in the group is unknown, or a value has the wrong form.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, tuple[Any, str]] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = VARIABLES.get(variable)
        if name is None:
            # The value is not shown: a misplaced secret would end up in a notebook.
            raise SandboxSpecRejectedError(
                variable,
                None,
                "is not a setting of sandbox-kernel",
                f"Unset it. {closest(variable, tuple(VARIABLES))}",
            )
        text = environ[variable].strip()
        if text:
            values[name] = (_value(SETTINGS[name], variable, text), variable)
    return values


def _value(setting: Setting, variable: str, text: str) -> Any:
    """Return the value that a text stands for; errors name the variable."""
    value: object = text
    if isinstance(setting.trait, Bool):
        if text.lower() not in _TRUE | _FALSE:
            raise SandboxSpecRejectedError(
                variable, text, "is neither true nor false", "Use 1 or 0."
            )
        value = text.lower() in _TRUE
    elif isinstance(setting.trait, Float | Integer):
        try:
            value = int(text) if isinstance(setting.trait, Integer) else float(text)
        except ValueError:
            raise SandboxSpecRejectedError(
                variable, text, "is not a number", "Write a number."
            ) from None
    try:
        return check_setting(setting.name, value)
    except SandboxSpecRejectedError as error:
        raise SandboxSpecRejectedError(variable, error.value, error.reason, error.remedy) from error
