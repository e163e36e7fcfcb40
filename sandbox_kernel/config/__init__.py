"""One layered configuration for every door: kernel, magics, Python and the command line (K7).

From low to high: built-in default, the environment group ``SANDBOX_DOCKER_*``, configuration
files, and what the kernelspec or the caller asks for. The administrator's policy then judges
the result. `resolve` does all of it; the doors differ in nothing but what they hand to it.
"""

from sandbox_kernel.config.defaults import (
    DEFAULT_IMAGE,
    R_IMAGE,
    SETTINGS,
    SandboxDefaults,
    Setting,
    check_setting,
    unknown_setting,
)
from sandbox_kernel.config.engine import EngineSettings
from sandbox_kernel.config.environment import ENVIRONMENT_PREFIX, VARIABLES, read_environment
from sandbox_kernel.config.files import (
    CONFIG_NAME,
    ConfigFile,
    config_folders,
    load_config_files,
    load_policy_in_force,
    policy_folders,
)
from sandbox_kernel.config.resolution import (
    Door,
    Effective,
    Origin,
    Resolved,
    Survey,
    engine_settings,
    resolve,
    survey,
)

__all__ = [
    "CONFIG_NAME",
    "DEFAULT_IMAGE",
    "ENVIRONMENT_PREFIX",
    "R_IMAGE",
    "SETTINGS",
    "VARIABLES",
    "ConfigFile",
    "Door",
    "Effective",
    "EngineSettings",
    "Origin",
    "Resolved",
    "SandboxDefaults",
    "Setting",
    "Survey",
    "check_setting",
    "config_folders",
    "engine_settings",
    "load_config_files",
    "load_policy_in_force",
    "policy_folders",
    "read_environment",
    "resolve",
    "survey",
    "unknown_setting",
]
