"""The flags of each magic, and what a run is made of them."""

from __future__ import annotations

from typing import Final

from sandbox_magics.flags import Flag, Flags, count, duration, number, one_of, size, variable

__all__ = [
    "ARTIFACTS",
    "ATTACH",
    "BUILD",
    "CELL",
    "DOCTOR",
    "GET",
    "KILL",
    "LIST",
    "LOGS",
    "PUT",
    "RUN",
    "STATUS",
]

_WHERE: Final = (
    Flag(("--network", "-n"), "Ask somebody for the network, for this run only; implies --fresh."),
    Flag(("--fresh",), "Run in a sandbox of its own, which is removed afterwards."),
    Flag(("--session",), "Run in the notebook's sandbox, which keeps its files."),
    Flag(("--image", "-i"), "Image of a fresh sandbox.", "REF"),
    Flag(
        ("--setup",),
        "A command line that root runs first, for a fresh sandbox. May be repeated.",
        "CMD",
        repeat=True,
    ),
    Flag(("--memory",), "Memory of a fresh sandbox, for example 2G.", "SIZE", size),
    Flag(("--cpus",), "Processors of a fresh sandbox, for example 0.5.", "NUMBER", number),
    Flag(("--pids",), "Processes and threads of a fresh sandbox.", "NUMBER", count),
)
_RESULT: Final = (
    Flag(("--out",), "Variable that gets stdout as text, instead of showing it.", "VAR", variable),
    Flag(("--err",), "Variable that gets stderr as text, instead of showing it.", "VAR", variable),
    Flag(
        ("--result", "-r"), "Variable that gets the result; _sandbox has it too.", "VAR", variable
    ),
    Flag(("--no-raise-error",), "Raise no error when the run fails."),
    Flag(("--bg",), "Return at once; see --proc, %sandbox_logs and %sandbox_kill."),
    Flag(("--proc",), "Variable that gets the handle of a run in the background.", "VAR", variable),
    Flag(
        ("--artifact", "-a"),
        "Copy these files of /output into the notebook's folder. May be repeated.",
        "GLOB",
        repeat=True,
    ),
    Flag(("--quiet", "-q"), "Show nothing, but that a run failed."),
    Flag(("--capture-limit",), "Bytes that are kept of each stream (10M).", "SIZE", size),
    Flag(("--display-limit",), "Characters that are shown (1M).", "SIZE", size),
    Flag(("--name",), "What the run is called in %sandbox_status.", "LABEL"),
)
_PROGRAM: Final = (
    Flag(
        ("--timeout", "-t"),
        "Time after which it is stopped; 0 is the longest allowed.",
        "SEC",
        duration,
    ),
    Flag(("--idle-timeout",), "Time without output after which it is stopped.", "SEC", duration),
    Flag(
        ("--env", "-e"),
        "A variable; NAME alone takes the notebook's. May be repeated.",
        "NAME[=VALUE]",
        repeat=True,
    ),
    Flag(("--in",), "Variable that is its input: bytes, text or a data frame.", "VAR", variable),
    Flag(("--in-format",), "Of a data frame: csv or parquet.", "FORMAT", one_of("csv", "parquet")),
    Flag(
        ("--push",),
        "Put a variable into a file before (csv, parquet, npy, json, text, bytes).",
        "VAR[=PATH]",
        repeat=True,
    ),
    Flag(
        ("--pull",),
        "Get a file into a variable afterwards, by its suffix.",
        "PATH[=VAR]",
        repeat=True,
    ),
    Flag(("--cwd", "-C"), "Where it runs (/workspace).", "PATH"),
    Flag(("--tty",), "Give it a terminal: colours and progress bars; stderr joins stdout."),
)

_TEMPLATE: Final = Flag(
    ("--template",),
    "In the cell, {{name}} is a variable, quoted for a shell; {{name|raw}} is not quoted.",
)

CELL: Final = Flags(
    [*_RESULT, *_PROGRAM, _TEMPLATE, *_WHERE],
    usage="%%sandbox [FLAGS] [--] [INTERPRETER [ARG …]]",
    rest="INTERPRETER",
    examples=(
        "%%sandbox                        the cell is a bash script (-euo pipefail)",
        "%%sandbox python3 -              the cell goes to Python's input",
        "%%sandbox -t 10m --out log       at most 10 minutes; what it prints goes into log",
        "%%sandbox --in df -e TOKEN       the data frame df as CSV, the variable TOKEN",
        "%%sandbox --bg --proc job        goes on in the background: job.wait(), job.kill()",
    ),
)

RUN: Final = Flags(
    [
        Flag(("--shell",), "A command line for a shell, instead of a program.", "TEXT"),
        *_RESULT,
        *_PROGRAM,
        *_WHERE,
    ],
    usage="%sandbox_run [FLAGS] [--] PROGRAM [ARG …]",
    rest="PROGRAM",
    examples=(
        "r = %sandbox_run -- pytest -q tests",
        "%sandbox_run ls -l {folder}          the value of folder, as one word",
        "%sandbox_run cat {files...}          each element of files, as a word of its own",
        "%sandbox_run --shell 'cat *.csv | wc -l'",
        "%%sandbox_run                        one word on each line of the cell, without quotes",
    ),
)

KILL: Final = Flags(
    [
        Flag(("--all",), "Every run."),
        Flag(("--signal",), "TERM or INT tell the program, KILL ends it (KILL).", "NAME",
             one_of("TERM", "INT", "KILL")),
        Flag(("--session",), "The notebook's sandbox too, with its files. Asks first."),
        Flag(("--yes", "-y"), "Do not ask."),
    ],
    usage="%sandbox_kill [FLAGS] [RUN …]",
    rest="RUN",
    anywhere=True,
    examples=(
        "%sandbox_kill                    the run in progress, else the newest in the background",
        "%sandbox_kill r12 --signal TERM",
        "%sandbox_kill --session -y",
    ),
)  # fmt: skip

STATUS: Final = Flags(
    [
        Flag(("--verbose", "-v"), "More of everything."),
        Flag(("--json",), "Return a dictionary."),
        Flag(
            ("--watch",), "Show it anew every so often, until it is interrupted.", "SEC", duration
        ),
    ],
    usage="%sandbox_status [FLAGS]",
)

LOGS: Final = Flags(
    [Flag(("--lines", "-n"), "How many lines (10).", "NUMBER", count)],
    usage="%sandbox_logs [FLAGS] [RUN]",
    rest="RUN",
    anywhere=True,
)

ATTACH: Final = Flags([], usage="%sandbox_attach RUN", rest="RUN", anywhere=True)

_FORCE: Final = Flag(("--force", "-f"), "Replace what is there.")

GET: Final = Flags(
    [_FORCE],
    usage="%sandbox_get [-f] PATH [LOCAL]",
    rest="PATH",
    anywhere=True,
    examples=("%sandbox_get model.bin", "%sandbox_get -f /output/plots results/"),
)

PUT: Final = Flags(
    [_FORCE],
    usage="%sandbox_put [-f] LOCAL [PATH]",
    rest="LOCAL",
    anywhere=True,
    examples=("%sandbox_put data.csv", "%sandbox_put data inputs/data"),
)

LIST: Final = Flags(
    [Flag(("--recursive", "-R"), "What is in folders too.")],
    usage="%sandbox_ls [-R] [PATH]",
    rest="PATH",
    anywhere=True,
)

BUILD: Final = Flags(
    [
        Flag(("--tag", "-t"), "Name of the image.", "TAG"),
        Flag(("--file",), "The Dockerfile, within the folder (Dockerfile).", "DOCKERFILE"),
        Flag(("--base-image",), "For the image of sandbox-kernel: what to start from.", "REF"),
        Flag(("--pip",), "For it: a Python package in addition.", "PACKAGE", repeat=True),
        Flag(("--apt",), "For it: a Debian package in addition.", "PACKAGE", repeat=True),
        Flag(("--pull",), "Look for a newer base image."),
        Flag(("--no-cache",), "Run every step again."),
        Flag(("--network",), "Ask somebody for the network for the Dockerfile's commands."),
        Flag(("--quiet", "-q"), "Show only what came out."),
    ],
    usage="%sandbox_build [FLAGS] [DIR]",
    rest="DIR",
    anywhere=True,
    examples=(
        "%sandbox_build                       the image of sandbox-kernel",
        "%sandbox_build --pip polars          with a package more",
        "%sandbox_build -t mine:1 folder      from folder/Dockerfile",
        "%%sandbox_build -t mine:1            the cell is the Dockerfile",
    ),
)

DOCTOR: Final = Flags([], usage="%sandbox_doctor")

ARTIFACTS: Final = Flags([], usage="%sandbox_artifacts [RUN]", rest="RUN", anywhere=True)
