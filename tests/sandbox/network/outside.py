"""A simulated outside: accepts TCP and answers DNS on addresses, and writes down who asked what.

Run in a network namespace as ``outside.py LOG WORD…`` where a word is ``tcp:HOST:PORT`` or
``dns:HOST``. Each question becomes a line ``HOST NAME`` of the log; ``ready`` is its first line.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path


def accept(server: socket.socket) -> None:
    while True:
        server.accept()[0].close()


def answer(server: socket.socket, host: str, log: Path) -> None:
    while True:
        question, asker = server.recvfrom(4096)
        labels, rest = [], question[12:]
        while rest and rest[0]:
            labels.append(rest[1 : 1 + rest[0]].decode("ascii", "replace"))
            rest = rest[1 + rest[0] :]
        with log.open("a") as file:
            file.write(f"{host} {'.'.join(labels)}\n")
        # There is no such name; that is an answer too.
        header = question[:2] + bytes.fromhex("81830001000000000000")
        server.sendto(header + question[12:], asker)


def main() -> None:
    log = Path(sys.argv[1])
    for word in sys.argv[2:]:
        kind, _, rest = word.partition(":")
        if kind == "tcp":
            host, _, port = rest.rpartition(":")
            server = socket.create_server((host, int(port)), backlog=64)
            threading.Thread(target=accept, args=(server,), daemon=True).start()
        else:
            server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            server.bind((rest, 53))
            threading.Thread(target=answer, args=(server, rest, log), daemon=True).start()
    with log.open("a") as file:
        file.write("ready\n")
    threading.Event().wait()


if __name__ == "__main__":
    main()
