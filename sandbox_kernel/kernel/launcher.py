"""The launcher: becomes the kernel, after writing its connection file.

Contract. This file is a program. It runs inside the sandbox as the user of the code, below the
wrapper that every command has, started as ``python3 -I -S`` with its text and then one JSON
object read from stdin, on Python 3.8 or later with the standard library alone. It

* writes the connection file where only this user can read it, without following a link or
  touching a file that exists: keys travel on stdin and never stand in an argv, an engine
  event or an environment;
* gives the kernel its variables, of any name, and an empty input;
* starts no other process: it replaces itself with the kernel, which thus leads the process
  group and session that an interrupt is sent to;
* says on stderr why it cannot, and ends with 126 or 127.
"""

from __future__ import annotations

import json
import os
import sys

CANNOT_START = "The kernel cannot start"
NOT_FOUND = 127


def prepare(order: dict) -> list[str]:  # type: ignore[type-arg]
    """Write the connection file and return the kernel's argv."""
    # Not tempfile: importing it takes longer than all the rest of this program.
    folder = os.path.join(order["runtime_dir"], "kernel-" + os.urandom(8).hex())
    os.mkdir(folder, 0o700)
    path = os.path.join(folder, "connection.json")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(order["connection"], file)
    return [word.replace("{connection_file}", path) for word in order["argv"]]


def main() -> None:
    """Read the order and become the kernel; exit 126 or 127 when that fails."""
    order = json.loads(sys.stdin.buffer.readline())
    environment = {**os.environ, **order["environment"]}
    try:
        argv = prepare(order)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    except OSError as error:
        sys.exit(give_up(f"{error.strerror}: {error.filename}", 126))
    program = find(argv[0], environment.get("PATH", os.defpath))
    if program is None:
        sys.exit(give_up(f"program not found in the image: {argv[0]}", NOT_FOUND))
    os.execve(program, argv, environment)  # noqa: S606


def find(name: str, path: str) -> str | None:
    """Return the executable file that ``name`` means, as a shell would look it up."""
    folders = [""] if "/" in name else path.split(os.pathsep)
    candidates = (os.path.join(folder, name) for folder in folders)
    return next((c for c in candidates if os.access(c, os.X_OK) and os.path.isfile(c)), None)


def give_up(why: str, code: int) -> int:
    """Say why there will be no kernel, and return the code to end with."""
    sys.stderr.write(f"{CANNOT_START}: {why}\n")
    return code


if __name__ == "__main__":
    main()
