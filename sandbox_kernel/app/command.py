"""What all subcommands share: the engine's options, ``--json``, errors and exit codes.

A command returns its exit code from `run`. An error of ours is one message on standard error
(with ``--json``: one object on standard output) and exit code 1, never a traceback; a wrong
command line is exit code 2.
"""

from __future__ import annotations

import json
import logging
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from jupyter_core.application import JupyterApp
from rich.console import Console
from traitlets import Bool, Unicode
from traitlets.config.application import catch_config_error
from traitlets.config.loader import KVArgParseConfigLoader

from sandbox_kernel import __version__
from sandbox_kernel.config import EngineSettings, engine_settings
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError

ENGINE_ALIASES: dict[Any, Any] = {
    "engine": (
        "SandboxCommand.engine_host",
        "Docker engine: unix:///path, tcp://host[:port], https://host.",
    ),
    "tlscert": ("SandboxCommand.tls_cert_path", "Client certificate for the engine."),
    "tlskey": ("SandboxCommand.tls_key_path", "Key of the client certificate."),
    "tlscacert": ("SandboxCommand.tls_ca_path", "Authority that signed the engine's certificate."),
    "log-level": ("Application.log_level", "Level of the log, by number or name."),
}

ENGINE_FLAGS: dict[Any, Any] = {
    "json": ({"SandboxCommand": {"json_output": True}}, "Print the result as JSON."),
    "debug": ({"Application": {"log_level": 10}}, "Log everything."),
}


class _StrictLoader(KVArgParseConfigLoader):
    """Refuses an option that does not exist; a mistyped limit must not be ignored."""

    def _handle_unrecognized_alias(self, arg: str) -> None:
        self.parser.error(f"there is no option --{arg} (see --help)")


class SandboxCommand(JupyterApp):
    """Base of the subcommands."""

    version = __version__
    aliases = ENGINE_ALIASES
    flags = ENGINE_FLAGS

    engine_host = Unicode(
        None,
        allow_none=True,
        help="""Where the Docker engine listens: unix:///path, tcp://host[:port] or
        https://host[:port]. By default SANDBOX_DOCKER_HOST, DOCKER_HOST, the current docker
        context or the usual sockets, in this order. Since 0.1.""",
    ).tag(config=True)
    tls_cert_path = Unicode(
        "", help="Client certificate; by default /certs/client/cert.pem. Since 0.1."
    ).tag(config=True)
    tls_key_path = Unicode(
        "", help="Key of the client certificate; by default /certs/client/key.pem. Since 0.1."
    ).tag(config=True)
    tls_ca_path = Unicode(
        "", help="Authority to trust for the engine; by default /certs/client/ca.pem. Since 0.1."
    ).tag(config=True)
    json_output = Bool(False, help="Print the result as one JSON object. Since 0.1.").tag(
        config=True
    )

    def _log_level_default(self) -> int:
        # What a command has to say it prints; the log is for what goes wrong underneath.
        return logging.WARNING

    def _config_file_name_default(self) -> str:
        return "jupyter_sandbox_config"

    def _create_loader(
        self, argv: Any, aliases: Any, flags: Any, classes: Any
    ) -> KVArgParseConfigLoader:
        return _StrictLoader(argv, aliases, flags, classes=classes, log=self.log)

    @catch_config_error
    def initialize(self, argv: Any = None) -> None:
        """Read the command line and the configuration files; the former wins."""
        self.parse_command_line(argv)
        from_command_line = deepcopy(self.config)
        self.load_config_file()
        self.update_config(from_command_line)

    def start(self) -> None:
        """Run, and end the process with the exit code."""
        if self.extra_args:
            self._usage(f"takes no argument {self.extra_args[0]!r} (see --help)")
        try:
            code = self.run()
        except SandboxError as error:
            self.log.debug("the command failed", exc_info=True)
            code = self.fail(error)
        except KeyboardInterrupt:
            self.err.print("Interrupted.")
            code = 130
        except BrokenPipeError:
            # The reader of a pipe has seen enough; nothing more may be written to it.
            sys.stdout = None
            code = 1
        self.exit(code)

    def run(self) -> int:
        """Do the work of the command and return its exit code."""
        raise NotImplementedError

    def _usage(self, text: str) -> NoReturn:
        print(f"{self.name.replace('-', ' ', 2)}: {text}", file=sys.stderr)
        self.exit(2)
        raise AssertionError("exit returned")

    def fail(self, error: SandboxError) -> int:
        """Show an error to the person, or to the program, that called."""
        if self.json_output:
            self.print_json({"ok": False, "error": error_record(error)})
        else:
            self.err.print("[bold red]Error:[/]", end=" ")
            self.err.print(str(error), markup=False, highlight=False)
        return 1

    # -- output -------------------------------------------------------------------------------

    @property
    def out(self) -> Console:
        """Standard output, for results."""
        return Console(soft_wrap=True, highlight=False)

    @property
    def err(self) -> Console:
        """Standard error, for progress and errors."""
        return Console(stderr=True, soft_wrap=True, highlight=False)

    def print_json(self, value: object) -> None:
        """Print the result of ``--json``."""
        print(json.dumps(value, indent=2, sort_keys=True))

    # -- the engine ---------------------------------------------------------------------------

    def engine_settings(self) -> EngineSettings:
        """Return the settings of the engine: the environment's, overridden by the options."""
        changes: dict[str, Any] = {}
        if self.engine_host:
            changes["host"] = self.engine_host
        for name in ("tls_cert_path", "tls_key_path", "tls_ca_path"):
            text = getattr(self, name)
            if text:
                changes[name] = self._absolute(name, text)
        return replace(engine_settings(), **changes)

    def endpoint(self) -> Endpoint:
        """Choose the engine."""
        return resolve_endpoint(self.engine_settings())

    @staticmethod
    def _absolute(setting: str, text: str) -> Path:
        if "-----BEGIN" in text:
            raise SandboxSpecRejectedError(
                setting, None, "holds key material, not a path", "Name the file instead."
            )
        return Path(text).expanduser().absolute()


def error_record(error: SandboxError) -> dict[str, object]:
    """Describe an error for ``--json``."""
    record: dict[str, object] = {"type": type(error).__name__, "text": str(error)}
    for name in ("setting", "remedy", "kind"):
        value = getattr(error, name, None)
        if value:
            record[name] = value
    return record
