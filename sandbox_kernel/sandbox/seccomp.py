"""The system call filter: loads and checks ``seccomp.json`` (security profile, section 2.3).

The profile is an allow-list by hand, in groups named after manual pages; whatever it does not
name gives EPERM. It goes to the engine inline, as text, so nothing of it has to be on the
engine's machine, and only the machine's own calling convention is let through.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, Final

NEVER_ALLOWED: Final = frozenset(
    """
    acct add_key adjtimex bpf chroot clock_adjtime clock_settime clone3 delete_module fanotify_init
    finit_module fsconfig fsmount fsopen fspick get_mempolicy init_module io_setup io_submit
    io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load
    keyctl lookup_dcookie mbind memfd_secret migrate_pages modify_ldt mount mount_setattr
    move_mount move_pages mq_open msgget msgsnd name_to_handle_at nfsservctl open_by_handle_at
    open_tree openat2 perf_event_open pidfd_getfd pivot_root process_madvise process_vm_readv
    process_vm_writev ptrace quotactl quotactl_fd reboot request_key seccomp set_mempolicy
    setdomainname sethostname setns settimeofday swapoff swapon syslog umount umount2 unshare
    userfaultfd uselib vhangup vmsplice
    """.split()  # noqa: SIM905 - one name a line would be a page
)
"""Not to be let through under any condition."""

CONDITIONAL: Final = frozenset(
    {"chmod", "clone", "creat", "fchmod", "fchmodat", "fchmodat2", "ioctl", "mkdir", "mkdirat"}
    | {"mknod", "mknodat", "open", "openat", "personality", "socket", "socketpair"}
)
"""Let through only with a condition on their arguments."""

_OPERATORS = frozenset({"SCMP_CMP_EQ", "SCMP_CMP_MASKED_EQ"})


@functools.cache
def profile_text() -> str:
    """Return the profile as the engine takes it, without the comments."""
    profile = load_profile()
    for rule in profile["syscalls"]:
        rule.pop("comment", None)
    return json.dumps(profile, separators=(",", ":"))


def load_profile() -> dict[str, Any]:
    """Read the profile of the package and check it."""
    text = resources.files(__package__).joinpath("seccomp.json").read_text(encoding="utf-8")
    profile = json.loads(text)
    check_profile(profile)
    return dict(profile)


def check_profile(profile: dict[str, Any]) -> None:
    """Refuse a profile that is weaker than an edit of it could have meant.

    Raises
    ------
    ValueError
        It says what is wrong.
    """
    if profile.get("defaultAction") != "SCMP_ACT_ERRNO":
        raise ValueError("what is not named must be refused")
    if "architectures" in profile or any(a["subArchitectures"] for a in profile["archMap"]):
        raise ValueError("only the native calling convention may pass")
    for rule in profile["syscalls"]:
        _check_rule(rule)


def _check_rule(rule: dict[str, Any]) -> None:
    names, args = set(rule["names"]), rule.get("args", [])
    if set(rule) - {"comment", "names", "action", "args", "errnoRet"}:
        # Docker's conditions on capabilities or kernels would make the profile differ by machine.
        raise ValueError(f"a rule for {sorted(names)} says more than it may")
    if rule["action"] == "SCMP_ACT_ERRNO":
        return
    if rule["action"] != "SCMP_ACT_ALLOW":
        raise ValueError(f"{rule['action']} is neither a permission nor a refusal")
    if names & NEVER_ALLOWED:
        raise ValueError(f"{sorted(names & NEVER_ALLOWED)} must not pass")
    if names & CONDITIONAL and not args:
        raise ValueError(f"{sorted(names & CONDITIONAL)} may pass with a condition only")
    if any(arg["op"] not in _OPERATORS for arg in args):
        # An order compares all 64 bits where the kernel looks at 32.
        raise ValueError("conditions are equalities, with or without a mask")
    if len({arg["index"] for arg in args}) != len(args):
        # The runtime makes alternatives of them.
        raise ValueError("two conditions on one argument do not both apply")
