"""Runs inside a sandbox as the code's uid: what ordinary programs need must work."""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import mmap
import multiprocessing
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory


def threads():
    done = []
    many = [threading.Thread(target=done.append, args=(i,)) for i in range(64)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    assert len(done) == 64


def double(x):
    return 2 * x


def pool():
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(2, mp_context=context) as executor:
            assert list(executor.map(double, range(4))) == [0, 2, 4, 6]


def shared():
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    memory.buf[0] = 7
    memory.close()
    memory.unlink()


def database():
    with contextlib.closing(sqlite3.connect("/workspace/t.db")) as base:
        base.execute("pragma journal_mode=wal")
        base.execute("create table t(x)")
        base.execute("insert into t values (1)")
        base.commit()


def programs():
    assert subprocess.run(["sh", "-c", "echo $((1+1))"], capture_output=True).stdout == b"2\n"


async def _loop():
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    assert (await child.communicate(b"x"))[0] == b"x"

    async def serve(reader, writer):
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"line\n")
    assert await reader.readline() == b"line\n"
    writer.close()
    server.close()


def loop():
    asyncio.run(_loop())


def polling():
    near, far = socket.socketpair()
    poll = select.epoll()
    poll.register(near, select.EPOLLIN)
    far.send(b"x")
    assert poll.poll(1)


def watching():
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(0)
    assert fd >= 0
    assert libc.inotify_add_watch(fd, b"/tmp", 0x100) >= 0


def anonymous():
    fd = os.memfd_create("x")
    with open("/bin/true", "rb") as program:
        os.write(fd, program.read())
    assert subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd]).returncode == 0


def scheduling():
    # libzmq aborts where this is denied.
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(1)


def mapping():
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"x")


def signals():
    heard = []
    signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not heard:
        time.sleep(0.01)


def files():
    with open("/workspace/f", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("x")
        file.flush()
        os.fsync(file.fileno())
    os.chmod("/workspace/f", 0o600)
    os.rename("/workspace/f", "/workspace/g")
    os.symlink("g", "/workspace/h")
    os.makedirs("/workspace/a/b")
    os.setxattr("/workspace/g", "user.x", b"1")
    assert set(os.listdir("/workspace")) >= {"g", "h", "a"}


def interfaces():
    assert [name for _, name in socket.if_nameindex()] == ["lo"]


def terminal():
    leader, follower = os.openpty()
    os.write(follower, b"x")
    assert os.read(leader, 1) == b"x"
    assert os.get_terminal_size(follower) is not None


def home_runs_programs():
    path = "/home/sbx/run.sh"
    with open(path, "w") as file:
        file.write("#!/bin/sh\nexit 3\n")
    os.chmod(path, 0o755)
    assert subprocess.run([path]).returncode == 3


def main():
    report = {}
    checks = (
        threads, pool, shared, database, programs, loop, polling, watching, anonymous, scheduling,
        mapping, signals, files, interfaces, terminal, home_runs_programs,
    )  # fmt: skip
    for check in checks:
        try:
            check()
            report[check.__name__] = "ok"
        except Exception as error:
            report[check.__name__] = repr(error)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
