"""What all subcommands share: the engine's options, ``--json``, errors and exit codes.

A command returns its exit code from `run`. An error of ours is one message on standard error
(with ``--json``: one object on standard output) and exit code 1, never a traceback; a wrong
command line is exit code 2.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NoReturn

from jupyter_core.application import JupyterApp
from rich.console import Console
from traitlets import Bool, HasTraits, Unicode
from traitlets.config.application import catch_config_error

from sandbox_kernel import __version__
from sandbox_kernel.app.display import plain
from sandbox_kernel.app.words import WrongWordsError, split
from sandbox_kernel.config import (
    ConfigFile,
    Door,
    EngineSettings,
    engine_settings,
    load_config_files,
)
from sandbox_kernel.engine.endpoint import Endpoint, resolve_endpoint
from sandbox_kernel.errors import SandboxError, SandboxSpecRejectedError
from sandbox_kernel.policy.document import closest
from sandbox_kernel.sandbox.order import Order, settle

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


_BUILT_IN: Final = frozenset({"h", "help", "help-all", "V", "version"})


class SandboxCommand(JupyterApp):
    """Base of the subcommands."""

    version = __version__
    aliases = ENGINE_ALIASES
    flags = ENGINE_FLAGS

    config_error: SandboxError | None = None
    """What is wrong with the configuration files, if anything; most commands then do nothing."""

    works_without_config = False
    """Whether the command does something useful when the configuration is broken."""

    usage_code = 2
    """The exit code for a command line that cannot be read."""

    arguments = ""
    """The words that it takes besides options, for its help; by default none."""

    first_word_ends = False
    """Whether what follows the first word is words too, such as those of a program."""

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

    def parse_command_line(self, argv: Any = None) -> None:
        """Take the command line apart; a mistyped option is refused and never ignored."""
        valued = {name for names in self.aliases for name in _names(names)}
        # What a configuration file calls them; of other classes nothing would be read.
        for base in type(self).mro():
            if issubclass(base, HasTraits):
                traits = base.class_own_traits(config=True)
                valued |= {f"{base.__name__}.{option}" for option in traits}
        flags = {name for names in self.flags for name in _names(names)} | _BUILT_IN
        try:
            options, words = split(
                sys.argv[1:] if argv is None else argv,
                valued,
                flags,
                first_word_ends=self.first_word_ends,
            )
        except WrongWordsError as error:
            self._usage(f"{error} (see --help)")
        try:
            super().parse_command_line(options)
        except SystemExit as error:
            # A value of the wrong kind; 1 would be an answer of some commands.
            raise SystemExit(self.usage_code if error.code else 0) from None
        self.extra_args = words

    @catch_config_error
    def initialize(self, argv: Any = None) -> None:
        """Read the command line and the configuration files; the former wins."""
        self.parse_command_line(argv)
        if self.config_file:
            self._usage("takes no file of its own; put it into a folder of JUPYTER_CONFIG_PATH")
        from_command_line = deepcopy(self.config)
        try:
            files = load_config_files()
            for file in files:
                self._check_sections(file)
                self.update_config(file.config)
        except SandboxError as error:
            # Errors become exit codes where the command is run.
            self.config_error = error
        self.update_config(from_command_line)

    def _check_sections(self, file: ConfigFile) -> None:
        """Refuse options of commands that do not exist; of settings they have been already."""
        # Here, since the table of commands is above this module.
        from sandbox_kernel.app.main import command_classes

        bases = [base for base in type(self).mro() if issubclass(base, HasTraits)]
        options = {base.__name__: tuple(base.class_trait_names(config=True)) for base in bases}
        for name, section in file.config.items():
            if not section or not (name.endswith("App") or name in options):
                continue
            if name not in options and name not in (known := command_classes()):
                raise SandboxSpecRejectedError(
                    name,
                    None,
                    f"there is no such command (in {file.path})",
                    closest(name, (*options, *known)),
                )
            # Options of another command are that one's to check.
            for option in set(section) - set(options[name]) if name in options else ():
                raise SandboxSpecRejectedError(
                    f"{name}.{option}",
                    None,
                    f"there is no such option (in {file.path})",
                    closest(option, options[name]),
                )

    def start(self) -> None:
        """Run, and end the process with the exit code."""
        self.take(self.extra_args)
        try:
            if self.config_error is not None and not self.works_without_config:
                raise self.config_error
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

    def take(self, words: list[str]) -> None:
        """Take the words that are no options; an unfit number of them is a wrong command line."""
        if words:
            self._usage(f"takes no argument {words[0]!r} (see --help)")

    def run(self) -> int:
        """Do the work of the command and return its exit code."""
        raise NotImplementedError

    def emit_description(self) -> Generator[str, None, None]:
        """Yield what the help begins with."""
        words = f" {self.arguments}" if self.arguments else ""
        yield f"Usage: {self._called} [OPTION…]{words}"
        yield ""
        yield from super().emit_description()

    @property
    def _called(self) -> str:
        return self.name.replace("-", " ")

    def _usage(self, text: str) -> NoReturn:
        print(f"{self._called}: {text}", file=sys.stderr)
        self.exit(self.usage_code)
        raise AssertionError("exit returned")

    def fail(self, error: SandboxError) -> int:
        """Show an error to the person, or to the program, that called."""
        if self.json_output:
            self.print_json({"ok": False, "error": error_record(error)})
        else:
            self.err.print("[bold red]Error:[/]", end=" ")
            self.err.print(plain(str(error)), markup=False, highlight=False)
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

    # -- configuration and the engine ---------------------------------------------------------

    def engine_options(self) -> dict[str, object]:
        """Return the settings of the engine that options name."""
        asked: dict[str, object] = {}
        if self.engine_host:
            asked["host"] = self.engine_host
        for name in ("tls_cert_path", "tls_key_path", "tls_ca_path"):
            text = getattr(self, name)
            if text:
                asked[name] = str(self._absolute(name, text))
        return asked

    def settle(self, requested: Mapping[str, object], door: Door = "command") -> Order:
        """Have configuration and policy settle what the command asks for."""
        return settle({**self.engine_options(), **requested}, door=door)

    def engine_settings(self) -> EngineSettings:
        """Return what is configured about the engine, overridden by the options."""
        return engine_settings(self.engine_options())

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


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def error_record(error: SandboxError) -> dict[str, object]:
    """Describe an error for ``--json``."""
    record: dict[str, object] = {"type": type(error).__name__, "text": str(error)}
    for name in ("setting", "remedy", "kind"):
        value = getattr(error, name, None)
        if value:
            record[name] = value
    return record
