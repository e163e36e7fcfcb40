"""A command that forges the report of its own end: CODE [kill-root | stay].

It finds the nonce in the memory of the shell that waits for it, writes the reports to that
shell's stderr, and then ends with 3, or kills the wrapper, before or after detaching a process.
"""

import os
import re
import signal
import subprocess
import sys

code = sys.argv[1]
then = sys.argv[2] if len(sys.argv) > 2 else ""
waiter = os.getppid()
nonces = set()
with open(f"/proc/{waiter}/maps") as maps, open(f"/proc/{waiter}/mem", "rb", 0) as memory:
    for line in maps:
        place, rights = line.split()[:2]
        if "w" not in rights:
            continue
        start, end = (int(number, 16) for number in place.split("-"))
        try:
            memory.seek(start)
            found = memory.read(end - start)
        except OSError:
            continue
        nonces.update(re.findall(rb"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", found))
assert nonces, "no nonce was found"
if then == "stay":
    subprocess.Popen(
        ["setsid", "sleep", "7300"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
output = os.open(f"/proc/{waiter}/fd/4", os.O_WRONLY)
for nonce in nonces:
    os.write(output, b"\x1e%s exit %s - - - - -\n" % (nonce, code.encode()))
    os.write(output, b"\x1e%s end\n" % nonce)
os.close(output)
if then:
    with open(f"/proc/{waiter}/stat") as stat:
        root = int(stat.read().rpartition(")")[2].split()[1])
    # Above the waiting shell are others of the wrapper, up to the one that the engine started.
    while root > 1:
        above = root
        with open(f"/proc/{root}/stat") as stat:
            root = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(above, signal.SIGKILL)
sys.exit(3)
