"""Try addresses all at once and print, as JSON, what came of each.

Takes words: ``tcp:HOST:PORT`` connects, ``dns:HOST`` asks a question. Written apart from the
product's own probe, so that the two can disagree.
"""

import errno
import json
import os
import socket
import sys
import threading

WAIT = 2.5


def connect(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(WAIT)
        sock.connect((host, int(port)))
    return "connected"


def ask(host, name="knock.example"):
    number = os.urandom(2)
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    question = number + bytes.fromhex("01000001000000000000") + labels + b"\0\0\1\0\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(WAIT)
        sock.connect((host, 53))
        sock.send(question)
        answer = sock.recv(4096)
    assert answer[:2] == number
    code = answer[3] & 15
    # The outside knows no name, and says so; anything else is the engine's own word.
    return "answered" if code == 3 else f"code {code}"


def knock(word, found):
    kind, _, rest = word.partition(":")
    try:
        if kind == "dns":
            found[word] = ask(rest, *sys.argv[1:2])
        else:
            found[word] = connect(*rest.rsplit(":", 1))
    except TimeoutError:
        found[word] = "timeout"
    except OSError as error:
        found[word] = errno.errorcode.get(error.errno, str(error))


found = {}
threads = [threading.Thread(target=knock, args=(word, found)) for word in sys.argv[2:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(found))
