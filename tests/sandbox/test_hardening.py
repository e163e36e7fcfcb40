"""What code in a sandbox can and cannot do, tried from inside (ESC and MUX cases)."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sandbox_kernel.engine.client import Engine
from sandbox_kernel.errors import SandboxImageUnsuitableError
from sandbox_kernel.sandbox import labels
from sandbox_kernel.sandbox.live import CODE_USER, CONTROL_USER, LiveSandbox
from sandbox_kernel.sandbox.spec import SandboxSpec
from tests.engines import busybox_archive
from tests.sandbox.conftest import MakeSandbox, marks, python, run, sh

ImportImage = Callable[[str, bytes, list[str]], str]

MAIN = 7
"""The pid of the lease loop, which the engine's init starts first."""


async def control_pid(sandbox: LiveSandbox) -> str:
    """Return the pid of the main process, and make sure that it is what it should be."""
    found = await sh(sandbox, "grep -l 'lease' /proc/[0-9]*/cmdline | head -5")
    pids = [line.split("/")[2] for line in found.out.split()]
    for pid in pids:
        owner = await sh(sandbox, 'grep Uid: "/proc/$1/status"', pid)
        if pid != "1" and owner.out.split()[1:2] == ["10002"]:
            return pid
    raise AssertionError(f"no main process among {pids}")


@pytest.mark.parametrize("user", [CODE_USER, CONTROL_USER])
async def test_no_process_has_a_privilege(sandbox: LiveSandbox, user: str) -> None:
    """ESC-01, B1."""
    status = await sh(sandbox, "cat /proc/self/status", user=user)
    facts = dict(line.split(":", 1) for line in status.out.splitlines())
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[name], 16) == 0, name
    assert facts["NoNewPrivs"].strip() == "1"
    assert facts["Seccomp"].strip() == "2"
    assert set(facts["Uid"].split()) == {user.partition(":")[0]}
    assert facts["Groups"].split() in ([], [user.partition(":")[2]])


async def test_the_main_process_and_init_are_hardened_too(sandbox: LiveSandbox) -> None:
    """ESC-01."""
    for pid in ("1", await control_pid(sandbox)):
        status = await sh(sandbox, 'cat "/proc/$1/status"', pid)
        facts = dict(line.split(":", 1) for line in status.out.splitlines())
        assert (int(facts["CapBnd"], 16), facts["Seccomp"].strip()) == (0, "2")
        assert set(facts["Uid"].split()) == {"10002"}


async def test_dangerous_system_calls_are_refused(sandbox: LiveSandbox) -> None:
    """ESC-02, ESC-04, ESC-05, ESC-07, ESC-16."""
    done = await python(sandbox, "denied.py", await control_pid(sandbox))
    assert done.code == 0, done
    report = {call: result for call, result in json.loads(done.out).items() if result is not None}
    assert len(report) > 50
    expected = dict.fromkeys(report, "EPERM") | {"clone3": "ENOSYS", "openat2": "ENOSYS"}
    # As refused as the others, by an error that useradd(8) understands.
    expected["netlink 9"] = "EPROTONOSUPPORT"
    assert report == expected


async def test_ordinary_programs_work(make_sandbox: MakeSandbox) -> None:
    """ESC-22, ESC-23: what is refused breaks nothing that people use."""
    done = await python(await make_sandbox(), "compat.py")
    assert done.code == 0, done
    assert set(json.loads(done.out).values()) == {"ok"}, done.out


async def test_the_control_uids_processes_are_out_of_reach(sandbox: LiveSandbox) -> None:
    """ESC-07, MUX-01, MUX-02, RES-19: not to be read, written, signalled or slowed."""
    pid = await control_pid(sandbox)
    for attempt in (
        'cat "/proc/$1/environ"',
        'head -c 1 "/proc/$1/mem"',
        'cat "/proc/$1/maps"',
        'head -c 1 "/proc/$1/fd/0"',
        'echo lease > "/proc/$1/fd/0"',
        'echo lease > "/proc/$1/fd/1"',
        'ls "/proc/$1/fd" "/proc/$1/cwd/" "/proc/$1/root/"',
        'kill -0 "$1"',
        'kill -STOP "$1"',
        'kill -KILL "$1"',
        "kill -KILL 1",
        'renice -n 19 -p "$1" || chrt -o -p 0 "$1"',
        'echo 1000 > "/proc/$1/oom_score_adj"',
    ):
        done = await sh(sandbox, attempt, pid)
        assert done.code != 0, attempt
        assert done.out == "", attempt
        assert "ermi" in done.err or "not permitted" in done.err, done  # "Permission", "permitted"
    assert not sandbox.ended.done()


async def test_a_program_with_the_set_user_id_bit_gains_nothing(
    make_sandbox: MakeSandbox, derived_image: Callable[[str, str], str]
) -> None:
    """ESC-08."""
    lines = (
        "RUN cp /bin/cat /usr/local/bin/suidcat && chmod 4755 /usr/local/bin/suidcat"
        " && cp /usr/bin/id /usr/local/bin/suidid && chmod 4755 /usr/local/bin/suidid"
    )
    sandbox = await make_sandbox(image=derived_image("suid", lines))
    there = await sh(sandbox, "test -u /usr/local/bin/suidcat && test -r /etc/passwd")
    assert there.code == 0
    done = await run(sandbox, ["/usr/local/bin/suidcat", "/etc/shadow"])
    assert done.code != 0
    assert done.out == ""
    who = await run(sandbox, ["/usr/local/bin/suidid", "-u"])
    assert who.out.strip() == "10001"


async def test_only_the_places_meant_for_it_can_be_written(sandbox: LiveSandbox) -> None:
    """ESC-10, B2."""
    refused = "/ /etc /usr /opt /var/tmp /root /sys /sys/fs/cgroup /run /proc /dev /var /home /bin"
    for place in refused.split():
        done = await sh(sandbox, 'echo x > "$1/x"', place)
        assert done.code != 0, place
    for place in ("/tmp", "/home/sbx", "/workspace", "/output", "/dev/shm"):
        done = await sh(sandbox, 'echo x > "$1/x" && cat "$1/x"', place)
        assert done.out == "x\n", done


async def test_kernel_knobs_cannot_be_turned(sandbox: LiveSandbox) -> None:
    """ESC-11."""
    for place in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
        "/proc/sys/kernel/hostname",
        "/proc/irq/default_smp_affinity",
    ):
        assert (await sh(sandbox, 'echo x > "$1"', place)).code != 0, place
    agents = await sh(sandbox, "for a in /sys/fs/cgroup/*/release_agent; do echo x > $a; done")
    assert agents.code != 0


async def test_mounts_are_exactly_those_of_a_sandbox(sandbox: LiveSandbox) -> None:
    """ESC-13, B2: nothing of the host, no socket, no certificate."""
    table = (await sh(sandbox, "cat /proc/self/mountinfo")).out
    options = {}
    for line in table.splitlines():
        fields = line.split()
        options[fields[4]] = {*fields[5].split(","), *fields[-1].split(",")}
    places = {p for p in options if not p.startswith(("/proc/", "/sys/"))}
    places -= {"/dev/console", "/sbin/docker-init", "/usr/sbin/docker-init"}
    assert places == {
        *("/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/etc/hostname"),
        *("/workspace", "/tmp", "/home/sbx", "/run", "/output"),
    }
    writable = {p for p, flags in options.items() if "rw" in flags and "ro" not in flags}
    assert writable & {"/workspace", "/tmp", "/home/sbx", "/run", "/output", "/"} == {
        *("/workspace", "/tmp", "/home/sbx", "/run", "/output"),
    }
    for place in ("/tmp", "/home/sbx", "/run", "/output"):
        assert options[place] >= {"nosuid", "nodev"}, place
        assert any(flag.startswith("size=") for flag in options[place]), place
    assert "docker.sock" not in table
    gone = await sh(sandbox, "ls /var/run/docker.sock /certs /run/docker.sock")
    assert gone.out == ""


async def test_what_tells_about_the_machine_is_masked(sandbox: LiveSandbox) -> None:
    """ESC-14."""
    for place in ("kallsyms", "cmdline", "interrupts", "config.gz", "modules", "timer_list"):
        assert (await sh(sandbox, 'cat "/proc/$1"', place)).out == "", place
    for place in ("/sys/module", "/sys/kernel", "/sys/class", "/sys/devices/virtual/dmi"):
        assert (await sh(sandbox, 'ls -A "$1"', place)).out == "", place
    cgroup = (await sh(sandbox, "cat /proc/self/cgroup")).out
    assert sandbox.id not in cgroup


async def test_there_is_no_network_but_loopback(sandbox: LiveSandbox) -> None:
    devices = (await sh(sandbox, "cat /proc/net/dev")).out.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    assert (await sh(sandbox, "cat /proc/net/route")).out.count("\n") == 1
    # Neither comes from the engine's machine.
    assert (await sh(sandbox, "cat /etc/resolv.conf /etc/hosts")).out == ""
    assert "127.0.0.1" in (await sh(sandbox, "getent ahosts localhost")).out


async def test_an_image_that_needs_a_hosts_file_gets_one(
    make_sandbox: MakeSandbox, imported_image: ImportImage
) -> None:
    """B2: only an image that says so gives `localhost` an address by itself."""
    sandbox = await make_sandbox(image=imported_image("plain", busybox_archive(), []))
    devices = (await sh(sandbox, "cat /proc/net/dev")).out.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]
    assert (await sh(sandbox, "cat /proc/net/route")).out.count("\n") == 1
    resolver = (await sh(sandbox, "grep nameserver /etc/resolv.conf")).out.split()
    assert resolver == ["nameserver", "192.0.2.1"]
    assert "localhost" in (await sh(sandbox, "cat /etc/hosts")).out


async def test_limits_are_what_was_asked_for(make_sandbox: MakeSandbox) -> None:
    """B5, RES-05, RES-10, RES-16."""
    mib = 1024 * 1024
    sandbox = await make_sandbox(
        mem_limit=256 * mib, cpu_limit=0.5, pids_limit=64, tmpfs_size=16 * mib, shm_size=8 * mib
    )
    told = await sandbox.engine.inspect_container(sandbox.id)
    assert told["HostConfig"]["Memory"] == told["HostConfig"]["MemorySwap"] == 256 * mib
    # Not the soft limit of files: runc before 1.1.13 lets it race with Go's own raising of it.
    limits = (await sh(sandbox, "ulimit -Hn; ulimit -Hc")).out.split()
    assert limits == ["4096", "0"]
    for place, size in (("/tmp", 16), ("/home/sbx", 16), ("/output", 16), ("/dev/shm", 8)):
        full = await sh(sandbox, 'head -c 100m /dev/zero > "$1/f"; wc -c < "$1/f"', place)
        assert int(full.out) == size * mib, place
    # All of them full, a program still starts.
    assert (await sh(sandbox, "rm /tmp/f && echo fine")).out == "fine\n"


@pytest.fixture
def hostile_image(imported_image: ImportImage) -> str:
    """An image that tries by its metadata what it can (ESC-20)."""
    return imported_image(
        "hostile",
        busybox_archive(),
        [
            "ENV PATH=/workspace/bin:/bin:/tmp LD_PRELOAD=/e.so PYTHONPATH=/e BASH_ENV=/e X=y",
            "VOLUME /data",
            "HEALTHCHECK --interval=1s CMD touch /data/$(id -u)",
            "USER root",
            'ENTRYPOINT ["sh", "-c", "touch /workspace/evil; sleep 100"]',
            "LABEL io.sandbox-kernel.owner=mallory io.sandbox-kernel.keep=forever other=kept",
            "EXPOSE 80",
            "WORKDIR /data",
        ],
    )


async def test_what_an_image_says_of_itself_changes_nothing(
    make_sandbox: MakeSandbox, hostile_image: str
) -> None:
    """ESC-20."""
    sandbox = await make_sandbox(image=hostile_image)
    config = (await sandbox.engine.inspect_container(sandbox.id))["Config"]
    env = dict(entry.partition("=")[::2] for entry in config["Env"])
    assert (env["LD_PRELOAD"], env["PYTHONPATH"], env["BASH_ENV"]) == ("", "", "")
    assert (env["X"], env["PATH"]) == ("y", "/bin")
    assert config["Labels"][labels.OWNER] == "tester"
    assert config["Labels"]["io.sandbox-kernel.keep"] == ""
    assert config["Labels"]["other"] == "kept"
    assert config["Healthcheck"]["Test"] == ["NONE"]
    assert config["User"] == CONTROL_USER
    assert (await sh(sandbox, "ls -A /workspace /data")).out == "/data:\n\n/workspace:\n"
    assert (await sh(sandbox, "grep -c ' /data tmpfs .*size=16384k' /proc/mounts")).out == "1\n"
    volumes = (await sandbox.engine.inspect_container(sandbox.id))["Mounts"]
    assert [volume["Destination"] for volume in volumes] == ["/workspace"]


@pytest.mark.parametrize("place", ["/etc", "/usr", "/proc/x", "/workspace/x", "/lib64/x", "/"])
async def test_an_image_with_a_volume_where_none_can_be_is_refused(
    engine: Engine, imported_image: ImportImage, run_labels: dict[str, str], place: str
) -> None:
    """ESC-20."""
    ref = imported_image("volume", busybox_archive(), [f"VOLUME {place}"])
    with pytest.raises(SandboxImageUnsuitableError, match=f"VOLUME '{place}'"):
        await LiveSandbox.create(
            engine, SandboxSpec(image=ref), owner="tester", extra_labels=marks(run_labels)
        )


async def test_secrets_of_the_environment_reach_the_code_and_nothing_else(
    make_sandbox: MakeSandbox, caplog: pytest.LogCaptureFixture
) -> None:
    """B12."""
    caplog.set_level("DEBUG")
    sandbox = await make_sandbox(environment={"PASSWORD": "hunter2"})
    assert (await sh(sandbox, "echo $PASSWORD")).out == "hunter2\n"
    assert (await sh(sandbox, "echo $PASSWORD", user=CONTROL_USER)).out == "\n"
    assert "hunter2" not in json.dumps(await sandbox.engine.inspect_container(sandbox.id))
    assert "hunter2" not in caplog.text
