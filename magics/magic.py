"""The magics: what stands in a cell becomes a request, a run, and what is shown and returned."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class
from sandbox_magics import options, view
from sandbox_magics.capture import STDERR, STDOUT
from sandbox_magics.declaration import magic
from sandbox_magics.expansion import expand, fill
from sandbox_magics.flags import Parsed, parse_words
from sandbox_magics.request import Request
from sandbox_magics.runs import Run, Runs
from sandbox_magics.sandboxes import Fresh, Place, Session
from sandbox_magics.screen import (
    Screen,
    can_be_asked,
    is_notebook,
    live,
    server_pace,
    stop_button,
    watch,
)
from sandbox_magics.worker import Worker
from traitlets import Float, Integer, Unicode

if TYPE_CHECKING:
    from sandbox_magics.result import SandboxResult
    from sandbox_magics.status import Status

__all__ = ["SandboxMagics"]

_LONGEST_WORD: Final = 128 * 1024 - 1
_END_PATIENCE: Final = 15.0
_SETTINGS: Final = {
    "image": "image",
    "memory": "mem_limit",
    "cpus": "cpu_limit",
    "pids": "pids_limit",
}


@dataclass(frozen=True, slots=True)
class Command:
    """What a magic is to run.

    Parameters
    ----------
    argv
        The program and its arguments.
    shown
        The same for people.
    stdin
        Its input, as far as the magic itself gives it one.
    source
        The magic as it was written, with its cell.
    fixed
        Whether no value of a variable is in it.
    """

    argv: tuple[str, ...] = field(repr=False)
    shown: tuple[str, ...] = field(repr=False)
    stdin: bytes = field(repr=False)
    source: str = field(repr=False)
    fixed: bool = True

    @property
    def told(self) -> str:
        """What a person is told before it runs: nothing that runs is left out."""
        return "\n".join(
            filter(None, (" ".join(self.shown), self.stdin.decode("utf-8", "replace")))
        )


@magics_class
class SandboxMagics(Magics):
    """Cells and commands in sandboxes.

    Everything is configurable: ``%config SandboxMagics.timeout = 300``, or in the configuration of
    IPython. What is left at `None` is taken from the configuration that all of sandbox-kernel
    shares; an administrator's policy is above both.
    """

    image = Unicode(None, allow_none=True, help="Image that sandboxes run from.").tag(config=True)
    mem_limit = Unicode(
        None, allow_none=True, help="Memory of a sandbox, with a unit (K, M, G). Example: '2G'"
    ).tag(config=True)
    cpu_limit = Float(None, allow_none=True, help="Processors of a sandbox.").tag(config=True)
    pids_limit = Integer(None, allow_none=True, help="Processes and threads of a sandbox.").tag(
        config=True
    )
    timeout = Float(None, allow_none=True, help="Seconds that a run may take.").tag(config=True)
    idle_timeout = Float(
        None, allow_none=True, help="Seconds that a run may go without output."
    ).tag(config=True)
    workspace = Unicode(
        None,
        allow_none=True,
        help="""Key of a workspace that outlives the session: any text, for example the name of a
        project. Notebooks of one person with the same key share it, and one sandbox as long as
        they run at the same time. Without one, files go with the session.""",
    ).tag(config=True)
    capture_limit = Integer(
        10 * 1024 * 1024, help="Bytes that are kept of each stream of a run."
    ).tag(config=True)
    display_limit = Integer(
        1024 * 1024,
        help="""Characters of output that a cell shows. A Jupyter server drops what exceeds a
        rate of its own, so that more than this takes its time there.""",
    ).tag(config=True)

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell=shell, parent=shell)
        self.runs = Runs()

    @cached_property
    def session(self) -> Session:
        """The sandbox that the cells of this process share; there is none before its first use."""
        return Session(self._session_settings)

    # -- runs -----------------------------------------------------------------------------------

    @magic("cell", options.CELL, scope=True)
    def sandbox(self, line: str, cell: str, local_ns: Mapping[str, Any] | None = None) -> None:
        """Run a cell in a sandbox: as a bash script, or as the input of an interpreter.

        The text of the cell is run as it is; hand over values with -e, --in or --push. The
        result is in _sandbox, and in the variable of --result.
        """
        parsed = options.CELL.parse(line)
        source = f"%%sandbox {line}".rstrip() + f"\n{cell}"
        if parsed["template"]:
            cell = fill(cell, self._variables(local_ns))
        if parsed.rest:
            if parsed["in"]:
                raise UsageError("--in: the cell is the input of the interpreter already")
            argv, stdin = parsed.rest, cell.encode("utf-8", "surrogateescape")
            shown = argv
        else:
            if len(cell.encode("utf-8", "surrogateescape")) > _LONGEST_WORD:
                raise UsageError(
                    "the cell is longer than the 128 KiB that one word of a command may have. "
                    "Hand it to the shell's input: %%sandbox bash -s"
                )
            argv, stdin = ("sh", "-c", _shell_text(), "cell", cell), b""
            shown = ("bash", "-euo", "pipefail", "-c", cell)
        command = Command(argv, shown, stdin, source, fixed=not parsed["template"])
        self._run(parsed, command, local_ns, fresh=False)

    @magic("both", options.RUN, scope=True)
    def sandbox_run(
        self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None
    ) -> SandboxResult | Run | None:
        """Run a program in a sandbox of its own, and return the result.

        No shell is involved: each word is one argument. {name} in a word is the value of the
        variable, whatever it holds; {{ and }} are braces. Flags end at the first word that is none.
        """
        parsed = options.RUN.parse(line)
        words = [*parsed.rest, *(parse_words(cell) if cell is not None else ())]
        if parsed["shell"] is not None:
            if words:
                raise UsageError("--shell: a command line and a program cannot both be run")
            argv: tuple[str, ...] = ("sh", "-c", parsed["shell"])
            fixed = True
        elif not words:
            raise UsageError(f"no program is named: {options.RUN.usage}")
        else:
            argv = tuple(expand(words, self._variables(local_ns)))
            fixed = argv == tuple(words)
        source = (
            f"%sandbox_run {line}".rstrip()
            if cell is None
            else (f"%%sandbox_run {line}".rstrip() + f"\n{cell}")
        )
        return self._run(parsed, Command(argv, argv, b"", source, fixed), local_ns, fresh=True)

    def _run(
        self,
        parsed: Parsed,
        command: Command,
        local_ns: Mapping[str, Any] | None,
        fresh: bool,
    ) -> SandboxResult | Run | None:
        """Run a command as the flags say."""
        request = self._request(parsed, command, self._variables(local_ns))
        place = self._place(parsed, fresh)
        if parsed["network"]:
            # Last, so that nobody is asked about what cannot be run anyway.
            place, request = self._with_network(parsed, command, request)
        run = self.runs.add(request, place, server_pace(os.environ))
        if parsed["bg"]:
            run.begin()
            return self._background(parsed, run)
        screen = Screen(is_notebook(self.shell), parsed["quiet"])
        with stop_button(run):
            run.begin()
            watch(run, screen)
            if run.result is not None:
                self._deliver(parsed, run, run.result)
                screen.end(run.result)
        return self._concluded(parsed, run)

    def _concluded(self, parsed: Parsed, run: Run) -> SandboxResult:
        """Return the result of a run that was watched, or raise what is to be raised of it."""
        from sandbox_magics.errors import (
            SandboxRunError,
            SandboxTimeoutError,
            SandboxUnknownOutcome,
            presented,
        )

        if run.interrupted:
            raise presented(KeyboardInterrupt(_stopped_text(run)))
        if run.error is not None:
            raise run.error
        result = run.result
        assert result is not None
        if run.lost is not None:
            raise SandboxUnknownOutcome(result, str(run.lost), run.reattach)
        if result.ok or parsed.get("no_raise_error"):
            if run.afterwards is not None:
                raise run.afterwards
            return result
        late = result.reason in ("timeout", "idle-timeout")
        raise SandboxTimeoutError(result) if late else SandboxRunError(result)

    def _background(self, parsed: Parsed, run: Run) -> Run | None:
        if parsed["proc"]:
            self.shell.user_ns[parsed["proc"]] = run
        if parsed["quiet"]:
            return None
        if is_notebook(self.shell):
            live(run)
        else:
            print(f"{run.id} runs in the background: %sandbox_logs {run.id}, "
                  f"%sandbox_kill {run.id}")  # fmt: skip
        return None

    def _deliver(self, parsed: Parsed, run: Run, result: SandboxResult) -> None:
        names = self.shell.user_ns
        names["_sandbox"] = result
        for flag, value in (("result", result), ("out", result.stdout), ("err", result.stderr)):
            if parsed[flag]:
                names[parsed[flag]] = value
        names.update(run.request.pulled())

    # -- from flags to requests -----------------------------------------------------------------

    def _variables(self, local_ns: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return {**self.shell.user_ns, **(local_ns or {})}

    def _settings(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a sandbox, by the names that all doors share."""
        chosen = {
            "image": flags.get("image") or self.image,
            "mem_limit": flags.get("memory") or self.mem_limit,
            "cpu_limit": flags.get("cpus") or self.cpu_limit,
            "pids_limit": flags.get("pids") or self.pids_limit,
            # Whatever is configured for others: here somebody has to say yes to each run.
            "network": "none",
        }
        return {name: value for name, value in chosen.items() if value is not None}

    def _session_settings(self) -> dict[str, Any]:
        lasting = {"durability": "persistent", "workspace": self.workspace}
        return {**self._settings({}), **(lasting if self.workspace else {})}

    def _place(self, parsed: Parsed, fresh: bool) -> Place:
        for name in ("fresh", "network"):
            if parsed[name] and parsed["session"]:
                raise UsageError(f"--{name} and --session exclude each other")
        fresh = (fresh or parsed["fresh"] or parsed["network"]) and not parsed["session"]
        own = [name for name in _SETTINGS if parsed[name] is not None]
        own += ["setup"] if parsed["setup"] else []
        if own and not fresh:
            remedy = ""
            if own[0] in _SETTINGS:
                setting = f"%config SandboxMagics.{_SETTINGS[own[0]]} = …"
                remedy = f". For the notebook's sandbox: {setting} before its first use"
            raise UsageError(f"--{own[0]} is for a sandbox of its own: add --fresh{remedy}")
        return Fresh(self._settings(parsed), parsed["setup"]) if fresh else self.session

    def _with_network(
        self, parsed: Parsed, command: Command, request: Request
    ) -> tuple[Place, Request]:
        """Obtain consent to the network, for this run alone."""
        from sandbox_magics.consent import Question, obtain, settled

        asked = {**self._settings(parsed), "network": "egress"}
        order = settled(asked)
        timeout = order.timeouts.default if request.timeout is None else request.timeout
        question = Question(
            source=command.source,
            command="\n".join([*(f"as root: {text}" for text in parsed["setup"]), command.told]),
            image=order.spec.image,
            timeout=timeout or order.timeouts.most,
            fixed=command.fixed,
        )
        return Fresh(asked, parsed["setup"]), replace(request, consent=obtain(self.shell, question))

    def _request(self, parsed: Parsed, command: Command, variables: Mapping[str, Any]) -> Request:
        from sandbox_magics.transfer import pulling, pushing
        from sandbox_magics.variables import environment, looked_up, to_stdin

        stdin = command.stdin
        env, secrets = environment(parsed["env"], variables)
        if parsed["in"]:
            given = looked_up(parsed["in"], variables, "--in")
            stdin = to_stdin(parsed["in"], given, parsed["in_format"] or "csv")
        elif parsed["in_format"]:
            raise UsageError("--in-format is the format of --in, which is not given")
        # What runs in the background is shown when somebody attaches to it.
        quiet = parsed["quiet"] and not parsed["bg"]
        hidden = {STDOUT: parsed["out"] or quiet, STDERR: parsed["err"] or quiet}
        return Request(
            argv=command.argv,
            shown=command.shown,
            stdin=stdin,
            env=env,
            secrets=secrets,
            cwd=parsed["cwd"] or "",
            timeout=self.timeout if parsed["timeout"] is None else parsed["timeout"],
            idle_timeout=parsed["idle_timeout"] or self.idle_timeout,
            tty=parsed["tty"],
            capture_limit=parsed["capture_limit"] or self.capture_limit,
            display_limit=parsed["display_limit"] or self.display_limit,
            show=frozenset(stream for stream, hide in hidden.items() if not hide),
            before=pushing(parsed["push"], variables),
            after=pulling(parsed["pull"]),
            copied=parsed["artifact"],
            name=parsed["name"] or f"[{self.shell.execution_count}]",
        )

    # -- looking after runs -----------------------------------------------------------------------

    @magic("line", options.KILL)
    def sandbox_kill(self, line: str) -> None:
        """End runs: the one in progress, else the newest one in the background.

        While a cell is busy, use the Stop button, or another console of the same kernel.
        """
        parsed = options.KILL.parse(line)
        runs = self._chosen(parsed)
        for run in runs:
            run.kill(parsed["signal"] or "KILL")
            print(repr(run))
        if parsed["session"]:
            self._end_session(parsed["yes"])
        elif not runs:
            print("nothing runs")

    def _chosen(self, parsed: Parsed) -> list[Run]:
        running = self.runs.running
        if parsed["all"]:
            return running
        if not parsed.rest:
            return [] if parsed["session"] else running[:1]
        return [self._found(name) for name in parsed.rest]

    def _found(self, name: str) -> Run:
        run = self.runs.find(name)
        if run is None:
            known = ", ".join(run.id for run in self.runs) or "none"
            raise UsageError(f"there is no run {name!r}; known are: {known}")
        return run

    def _end_session(self, sure: bool) -> None:
        if self.session.sandbox is None:
            print("there is no session")
            return
        if not sure:
            if not can_be_asked(self.shell):
                raise UsageError(
                    "--session destroys the sandbox with its files; to be sure, add -y"
                )
            files = ", with its files" if not self.workspace else ""
            question = f"Destroy the notebook's sandbox{files}? [y/N] "
            if input(question).strip().lower() not in ("y", "yes"):
                print("nothing was done")
                return
        Worker.current().run(self.session.end(), _END_PATIENCE)
        print("the session has ended")

    @magic("line", options.STATUS)
    def sandbox_status(self, line: str) -> Status | dict[str, Any] | None:
        """Show engine, session, limits, runs and image; each problem with what to do."""
        parsed = options.STATUS.parse(line)
        status = self._status(parsed["verbose"])
        if parsed["json"]:
            return status.data
        if parsed["watch"] is None:
            return status
        self._watch_status(status, max(parsed["watch"], 0.5), parsed["verbose"])
        return None

    def _status(self, detailed: bool) -> Status:
        from sandbox_magics.status import take

        session = self.__dict__.get("session")
        return Worker.current().run(
            take(self._session_settings(), session, self.runs, detailed), _END_PATIENCE
        )

    def _watch_status(self, status: Status, pause: float, detailed: bool) -> None:
        from IPython.display import display

        shown = display(status, display_id=True)  # type: ignore[no-untyped-call]
        try:
            while True:
                time.sleep(pause)
                status = self._status(detailed)
                if shown is not None:
                    shown.update(status)
        except KeyboardInterrupt:
            # That is how watching ends.
            return

    @magic("line", options.LOGS)
    def sandbox_logs(self, line: str) -> None:
        """Show the last lines of a run, by default the newest one."""
        parsed = options.LOGS.parse(line)
        run = self.one(parsed, "logs")
        lines = 10 if parsed["lines"] is None else parsed["lines"]
        from sandbox_magics.text import clean

        print(clean(run.tail(lines)))

    @magic("line", options.ATTACH)
    def sandbox_attach(self, line: str) -> None:
        """Show a run in the background as if the cell had started it: until its end, or Stop."""
        parsed = options.ATTACH.parse(line)
        run = self.one(parsed, "attach")
        screen = Screen(is_notebook(self.shell))
        with stop_button(run):
            watch(run, screen)
            if run.result is not None:
                screen.end(run.result)
        self._concluded(parsed, run)

    def one(self, parsed: Parsed, what: str) -> Run:
        """Return the run that a magic names, by default the newest one."""
        if len(parsed.rest) > 1:
            raise UsageError(f"%sandbox_{what} takes one run")
        if parsed.rest:
            return self._found(parsed.rest[0])
        newest = next(iter(self.runs), None)
        if newest is None:
            raise UsageError("there was no run yet")
        return newest

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything that was started here; called when the extension is unloaded."""
        for run in self.runs.running:
            run.stop("killed", grace=0)
        if "session" in self.__dict__:
            Worker.current().run(self.session.close(), _END_PATIENCE)


def _shell_text() -> str:
    from importlib import resources

    return resources.files(__package__).joinpath("shell.sh").read_text(encoding="utf-8")


def _stopped_text(run: Run) -> str:
    if run.running:
        return f"{run.id} was told to stop, and it is not known whether it has"
    result = run.result
    if result is not None and result.survivors:
        return f"{run.id} was stopped; something of it may still run"
    return f"{run.id} was stopped after {view.seconds(run.duration)}; nothing of it runs any more"
