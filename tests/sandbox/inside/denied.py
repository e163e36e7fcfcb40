"""Runs inside a sandbox as the code's uid: tries what must be refused, prints a JSON report."""

import ctypes
import errno
import json
import platform
import sys

libc = ctypes.CDLL(None, use_errno=True)
UP = 1 << 32
NUMBERS = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "clone": 56, "clone3": 435, "unshare": 272, "setns": 308,
        "io_uring_setup": 425, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "keyctl": 250, "add_key": 248, "open_by_handle_at": 304, "memfd_secret": 447,
        "modify_ldt": 154, "io_setup": 206, "vmsplice": 278, "process_vm_readv": 310,
        "pidfd_getfd": 438, "ioctl": 16, "mount": 165, "openat2": 437, "seccomp": 317,
        "mq_open": 240, "msgget": 68, "chmod": 90, "fchmodat": 268, "fchmodat2": 452,
        "openat": 257, "mknodat": 259, "kexec_load": 246, "init_module": 175, "syslog": 103,
        "pivot_root": 155, "chroot": 161, "swapon": 167, "name_to_handle_at": 303,
        "personality": 135, "move_pages": 279, "fanotify_init": 300, "iopl": 172, "kcmp": 312,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "clone": 220, "clone3": 435, "unshare": 97, "setns": 268,
        "io_uring_setup": 425, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "keyctl": 219, "add_key": 217, "open_by_handle_at": 265, "memfd_secret": 447,
        "io_setup": 0, "vmsplice": 75, "process_vm_readv": 270, "pidfd_getfd": 438, "ioctl": 29,
        "mount": 40, "openat2": 437, "seccomp": 277, "mq_open": 180, "msgget": 186,
        "fchmodat": 53, "fchmodat2": 452, "openat": 56, "mknodat": 33, "kexec_load": 104,
        "init_module": 105, "syslog": 116, "pivot_root": 41, "chroot": 51, "swapon": 224,
        "name_to_handle_at": 264, "personality": 92, "move_pages": 239, "fanotify_init": 262,
        "kcmp": 272,
    },
}[platform.machine()]  # fmt: skip


def call(name, *args):
    """Make one system call and name its outcome."""
    if name not in NUMBERS:
        return None
    whole = [a if isinstance(a, (bytes, ctypes.Array)) else ctypes.c_ulong(a) for a in args]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(NUMBERS[name]), *whole)
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]


buf = ctypes.create_string_buffer(256)
other = int(sys.argv[1])  # a process of the control uid
AT_FDCWD = (1 << 64) - 100
report = {
    # ESC-02
    "unshare user": call("unshare", 0x10000000),
    "unshare mount": call("unshare", 0x20000),
    "unshare net": call("unshare", 0x40000000),
    "clone user": call("clone", 0x10000000 | 17, 0, 0, 0, 0),
    "clone upper": call("clone", UP | 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": call("clone3", buf, 88),
    "setns": call("setns", 0, 0),
    # ESC-04
    "io_uring_setup": call("io_uring_setup", 4, buf),
    "bpf": call("bpf", 0, buf, 64),
    "perf_event_open": call("perf_event_open", buf, 0, (1 << 64) - 1, (1 << 64) - 1, 0),
    "userfaultfd": call("userfaultfd", 1),
    "keyctl": call("keyctl", 0, 0),
    "add_key": call("add_key", b"user", b"x", b"y", 1, (1 << 64) - 3),
    "open_by_handle_at": call("open_by_handle_at", 0, buf, 0),
    "name_to_handle_at": call("name_to_handle_at", AT_FDCWD, b"/", buf, buf, 0),
    "memfd_secret": call("memfd_secret", 0),
    "modify_ldt": call("modify_ldt", 0, buf, 16),
    "io_setup": call("io_setup", 1, buf),
    "vmsplice": call("vmsplice", 1, buf, 0, 0),
    # ESC-07
    "ptrace": call("ptrace", 16, other, 0, 0),
    "process_vm_readv": call("process_vm_readv", other, buf, 1, buf, 1, 0),
    "pidfd_getfd": call("pidfd_getfd", 0, 0, 0),
    "kcmp": call("kcmp", other, other, 0, 0, 0),
    # ESC-16
    "TIOCSTI": call("ioctl", 0, 0x5412, b"x"),
    "TIOCLINUX": call("ioctl", 0, 0x541C, b"x"),
    "TIOCSTI upper": call("ioctl", 0, UP | 0x5412, b"x"),
    "TIOCLINUX upper": call("ioctl", 0, UP | 0x541C, b"x"),
    # The rest of the profile
    "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, 0),
    "pivot_root": call("pivot_root", b"/", b"/"),
    "chroot": call("chroot", b"/"),
    "seccomp": call("seccomp", 0, 0, 0),
    "mq_open": call("mq_open", b"x", 0x42, 0o600, 0),
    "msgget": call("msgget", 0, 0o1600),
    "kexec_load": call("kexec_load", 0, 0, 0, 0),
    "init_module": call("init_module", buf, 0, b""),
    "syslog": call("syslog", 3, buf, 10),
    "swapon": call("swapon", b"/x", 0),
    "move_pages": call("move_pages", other, 0, 0, 0, 0, 0),
    "fanotify_init": call("fanotify_init", 0, 0),
    "iopl": call("iopl", 3),
    "personality": call("personality", 0x0040000),
    "openat2": call("openat2", AT_FDCWD, b"/", buf, 24),
    "chmod suid": call("chmod", b"/tmp", 0o4755),
    "fchmodat sgid": call("fchmodat", AT_FDCWD, b"/tmp", 0o2755),
    "fchmodat2 suid": call("fchmodat2", AT_FDCWD, b"/tmp", 0o4755, 0),
    "openat suid": call("openat", AT_FDCWD, b"/tmp/suid", 0o101, 0o4755),
    "openat tmpfile suid": call("openat", AT_FDCWD, b"/tmp", 0o20200002, 0o4755),
    "mknodat suid": call("mknodat", AT_FDCWD, b"/tmp/suid", 0o104755, 0),
}
# ESC-05: vsock, alg, netlink, xdp, packet, bluetooth … in both forms
for family in (38, 40, 30, 33, 44, 17, 31, 29, 4, 9):
    for upper in (0, UP):
        report[f"socket {family} {upper and 'upper'}"] = call("socket", family | upper, 3, 0)
for protocol in (2, 9, 12, 16):
    report[f"netlink {protocol}"] = call("socket", 16, 3, protocol)
report["inet upper"] = call("socket", UP | 2, 1, 0)
print(json.dumps(report))
