"""The one place that says how a sandbox's container is made (B1, B2, B16; security profile, 2.1).

`container_body` gives the whole request. What an image could slip in is settled here and not
left to the engine: each of its variables, labels, ports and volumes is either in the request
as it shall be, or the image is refused. So the attestation can compare the answer with the
request alone.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sandbox_kernel.engine.images import ImageInfo
from sandbox_kernel.errors import SandboxImageUnsuitableError
from sandbox_kernel.policy.mounts import HostFolder, host_folder
from sandbox_kernel.sandbox.lease import lease_command
from sandbox_kernel.sandbox.network import SharedNetwork
from sandbox_kernel.sandbox.seccomp import profile_text
from sandbox_kernel.sandbox.spec import RUN_SIZE, VOLUME_SIZE, Limits, SandboxSpec
from sandbox_kernel.sandbox.tiers import BLACKHOLE_DNS
from sandbox_kernel.sandbox.workspace import VolumeMount, quota_options

CODE_USER: Final = "10001:10001"
"""As whom all code of the user runs, and nothing else."""

CONTROL_USER: Final = "10002:10002"
"""As whom the main process and the relay run, out of the code's reach."""

WORKSPACE: Final = "/workspace"
HOME: Final = "/home/sbx"
PROJECT: Final = "/project"
OUTPUT: Final = "/output"
DATA: Final = "/data"
MOUNTS: Final = "/mnt"
TMP: Final = "/tmp"  # noqa: S108 - the sandbox's own
RUN: Final = "/run"

SETUP_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
"""What root needs to install packages, in a container in which nothing else runs (C3)."""

MASKED_PATHS: Final = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys"),
    *("/proc/kallsyms", "/proc/config.gz", "/proc/cmdline", "/proc/latency_stats"),
    *("/proc/modules", "/proc/pagetypeinfo", "/proc/partitions", "/proc/diskstats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/slabinfo", "/proc/timer_list"),
    *("/proc/timer_stats", "/proc/vmallocinfo", "/sys/block", "/sys/bus", "/sys/class"),
    *("/sys/devices/virtual/dmi", "/sys/devices/virtual/powercap", "/sys/firmware"),
    *("/sys/fs/ext4", "/sys/kernel", "/sys/module"),
)
READONLY_PATHS: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

SYSCTLS: Final = {
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv6.conf.default.disable_ipv6": "1",
    "net.ipv4.ping_group_range": "1 0",
    "kernel.msgmni": "0",
    "kernel.shmmni": "64",
    "kernel.shmall": "16384",
    "fs.mqueue.queues_max": "0",
}
ULIMITS: Final = {
    "nofile": (1024, 4096),
    "core": (0, 0),
    "fsize": (2147483648, 2147483648),
    "memlock": (65536, 65536),
    "msgqueue": (0, 0),
    "sigpending": (1024, 1024),
}

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOST_VOLUMES = 4

HOSTS_LABEL = "io.sandbox-kernel-image.hosts"
"""Label of an image in which ``localhost`` has an address without /etc/hosts: ``nss``."""

# These change what programs load or run before they do what they were called for, also in the
# control uid's processes. They are blanked whether or not the image sets them.
_ALWAYS_BLANK = (
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME"),
    *("BASH_ENV", "ENV", "GCONV_PATH", "GLIBC_TUNABLES", "LOCPATH"),
)
_BLANK = re.compile(
    r"LD_.*|PYTHON.*|BASH_.*|ENV|SHELLOPTS|BASHOPTS|PS4|IFS|CDPATH|GLOBIGNORE|GLIBC_TUNABLES|"
    r"GCONV_PATH|LOCPATH|NLSPATH|MALLOC_.*|RES_OPTIONS|HOSTALIASES|RESOLV_.*|TMPDIR|GETCONF_DIR"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.()%-]*")
_PLACE = re.compile(r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+")
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys")
_OURS = (WORKSPACE, HOME, TMP, RUN, OUTPUT)


@dataclass(frozen=True, slots=True)
class ImageParts:
    """What of an image's own configuration has a bearing on its containers."""

    env: Mapping[str, str]
    labels: Mapping[str, str]
    ports: tuple[str, ...]
    volumes: tuple[str, ...]
    small_volumes: tuple[str, ...]
    health_times: Mapping[str, int]
    needs_hosts: bool


def image_parts(image: ImageInfo, shown_as: str) -> ImageParts:
    """Read an image's configuration, which whoever made the image wrote.

    Parameters
    ----------
    image
        The image.
    shown_as
        What errors call it.

    Raises
    ------
    SandboxImageUnsuitableError
        It asks for something that a sandbox cannot give.
    """
    config = image.config
    if image.os not in {"", "linux"}:
        raise SandboxImageUnsuitableError(f"The image {shown_as!r} is not one for Linux")
    if config.get("OnBuild") and not isinstance(config["OnBuild"], list):
        raise SandboxImageUnsuitableError(f"The image {shown_as!r} has a broken configuration")
    env = {}
    for entry in config.get("Env") or ():
        name, _, value = str(entry).partition("=")
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise SandboxImageUnsuitableError(
                f"The image {shown_as!r} sets a variable whose name is not one: {name[:40]!r}"
            )
        env[name] = value
    volumes = tuple(sorted(str(place) for place in config.get("Volumes") or ()))
    labels = {str(k): str(v) for k, v in (config.get("Labels") or {}).items()}
    return ImageParts(
        env=env,
        labels=labels,
        ports=tuple(sorted(str(port) for port in config.get("ExposedPorts") or ())),
        volumes=volumes,
        small_volumes=_small_volumes(volumes, shown_as),
        # The engine adds them even to a health check that is turned off.
        health_times={
            key: value
            for key, value in (config.get("Healthcheck") or {}).items()
            if key != "Test" and isinstance(value, int)
        },
        needs_hosts=labels.get(HOSTS_LABEL) != "nss",
    )


def _small_volumes(volumes: tuple[str, ...], shown_as: str) -> tuple[str, ...]:
    """Return the image's ``VOLUME`` s that get a small tmpfs; on disk they would have no bound."""
    small = []
    for place in volumes:
        if posixpath.normpath(place) in _OURS:
            continue
        first = place.split("/")[1] if place.startswith("/") else ""
        within = any(place.startswith(own + "/") for own in _OURS)
        usable = _PLACE.fullmatch(place) and first not in _SYSTEM and place != "/usr"
        if within or not usable:
            raise SandboxImageUnsuitableError(
                f"The image {shown_as!r} declares VOLUME {place[:80]!r}, where a sandbox can have "
                "none. Build the image without it"
            )
        small.append(place)
    if len(small) > _MOST_VOLUMES:
        raise SandboxImageUnsuitableError(
            f"The image {shown_as!r} declares {len(small)} volumes; a sandbox gives room to "
            f"{_MOST_VOLUMES}. Build it with fewer"
        )
    return tuple(small)


def container_env(image_env: Mapping[str, str]) -> list[str]:
    """Return the container's environment: the image's, made harmless.

    Every name that the image sets is in the result, since the engine would add the others by
    itself. The search path loses what the code's uid can write to, so that nothing planted
    there is run by the control uid.
    """
    env = {name: "" if _BLANK.fullmatch(name) else text for name, text in image_env.items()}
    env.update(dict.fromkeys(_ALWAYS_BLANK, ""))
    path = [entry for entry in env.get("PATH", "").split(":") if _is_safe(entry)]
    env["PATH"] = ":".join(path) or _DEFAULT_PATH
    env["HOME"] = HOME
    return [f"{name}={value}" for name, value in sorted(env.items())]


def _is_safe(entry: str) -> bool:
    place = posixpath.normpath(entry)
    writable = (WORKSPACE, HOME, TMP, OUTPUT, "/dev", "/var/tmp", "/proc")  # noqa: S108
    return entry.startswith("/") and not any(
        place == root or place.startswith(root + "/") for root in writable
    )


def container_body(
    spec: SandboxSpec,
    limits: Limits,
    image: ImageInfo,
    labels: Mapping[str, str],
    network: SharedNetwork | None = None,
    workspace: VolumeMount | None = None,
) -> dict[str, Any]:
    """Return the body of the engine's create call for a sandbox.

    The spec's environment is not in it: everybody who may inspect the container could read it.

    Parameters
    ----------
    spec
        What is wanted.
    limits
        What that means on this machine.
    image
        The image, which is named by its id: a tag could move meanwhile.
    labels
        All labels of ours.
    network
        The network of the spec's tier, by its id; `None` for the tier that has none.
    workspace
        What is mounted as the workspace; by default a new anonymous volume.
    """
    parts = image_parts(image, spec.image)
    if workspace is None:
        kept = {k: v for k, v in labels.items() if v}
        workspace = VolumeMount(None, kept, quota_options(limits.disk))
    return {
        "Image": image.id,
        "User": CONTROL_USER,
        "Cmd": lease_command(
            lease_seconds(spec),
            lifetime_seconds(spec),
            idle=idle_seconds(spec),
            grace=grace_seconds(spec),
            place=WORKSPACE,
        ),
        "Entrypoint": [""],
        "Env": container_env(parts.env),
        "WorkingDir": "/",
        # All that the engine does for a network that is none is to write /etc/hosts, and more than
        # half of a start goes into that. The namespace is as empty without it.
        "NetworkDisabled": network is None and not parts.needs_hosts,
        "Hostname": "sandbox",
        "Domainname": "",
        "Labels": {**parts.labels, **labels},
        "Healthcheck": {**parts.health_times, "Test": ["NONE"]},
        "StopSignal": "SIGTERM",
        "StopTimeout": 1,
        "Tty": False,
        "OpenStdin": True,
        # The end of its input ends a sandbox at once; one that may outlive an owner sees none.
        "StdinOnce": not spec.is_shared,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "ExposedPorts": {port: {} for port in parts.ports},
        "Volumes": {place: {} for place in parts.volumes},
        "HostConfig": {
            **_host_config(limits, parts, spec.devices),
            **_network(spec, network),
            **_places(spec, limits, parts, workspace),
        },
    }


def _network(spec: SandboxSpec, network: SharedNetwork | None) -> dict[str, Any]:
    """Return what concerns the network, the resolver named in any case.

    An engine told of no resolver takes the host's, and where that is a loopback address it asks
    from the host's own network, past every rule for sandboxes (CVE-2024-29018).
    """
    mode = "none" if network is None else network.id
    if spec.network == "egress":
        servers = [] if spec.dns is None else [spec.dns]
        return {"NetworkMode": mode, "Dns": servers, "DnsOptions": [], "DnsSearch": ["."]}
    return {
        "NetworkMode": mode,
        "Dns": [BLACKHOLE_DNS],
        "DnsOptions": ["timeout:1", "attempts:1"],
        "DnsSearch": ["."],
    }


def _places(
    spec: SandboxSpec, limits: Limits, parts: ImageParts, workspace: VolumeMount
) -> dict[str, Any]:
    """Return what is mounted: volumes and memory."""
    data = {f"{DATA}/{name}": volume for name, volume in sorted(spec.data_sets.items())}
    folders = {f"{MOUNTS}/{name}": folder for name, folder in sorted(spec.mounts.items())}
    taken = {*data, *folders}
    volumes = tuple(
        place for place in parts.small_volumes if posixpath.normpath(place) not in taken
    )
    return {
        "Tmpfs": tmpfs_mounts(limits, volumes),
        "Mounts": [
            _workspace_mount(workspace),
            *(_data_mount(*item) for item in data.items()),
            *(_folder_mount(target, host_folder(text)) for target, text in folders.items()),
        ],
    }


def _workspace_mount(workspace: VolumeMount) -> dict[str, Any]:
    options: dict[str, Any] = {"NoCopy": False, "Labels": dict(workspace.labels)}
    # The options of a named volume were settled when that was made.
    if workspace.source is None and workspace.options:
        options["DriverConfig"] = {"Name": "local", "Options": dict(workspace.options)}
    mount = {
        "Type": "volume",
        "Target": WORKSPACE,
        "ReadOnly": False,
        "VolumeOptions": options,
    }
    return mount if workspace.source is None else {**mount, "Source": workspace.source}


def _data_mount(target: str, volume: str) -> dict[str, Any]:
    # Without a copy of what the image has there: it is somebody else's volume.
    return {
        "Type": "volume",
        "Source": volume,
        "Target": target,
        "ReadOnly": True,
        "VolumeOptions": {"NoCopy": True, "Labels": {}},
    }


def _folder_mount(target: str, folder: HostFolder) -> dict[str, Any]:
    # What is mounted below the folder stays outside, and what will be mounted there as well.
    return {
        "Type": "bind",
        "Source": folder.path,
        "Target": target,
        "ReadOnly": folder.read_only,
        "BindOptions": {"Propagation": "private", "NonRecursive": True},
    }


def _device_request(device: str) -> dict[str, Any]:
    if device.startswith("gpus="):
        count = device.removeprefix("gpus=")
        number = -1 if count == "all" else int(count)
        return {"Driver": "", "Count": number, "DeviceIDs": None, "Capabilities": [["gpu"]]}
    return {"Driver": "cdi", "Count": 0, "DeviceIDs": [device], "Capabilities": None}


def _host_config(limits: Limits, parts: ImageParts, devices: tuple[str, ...]) -> dict[str, Any]:
    security = ["no-new-privileges:true", f"seccomp={profile_text()}"]
    if limits.apparmor:
        security.append("apparmor=docker-default")
    body: dict[str, Any] = {
        "ReadonlyRootfs": True,
        "Init": True,
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": [],
        "SecurityOpt": security,
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "PidMode": "",
        "UTSMode": "",
        "UsernsMode": "",
        "CgroupParent": "",
        "Memory": limits.memory,
        "MemorySwap": limits.memory,
        "MemoryReservation": 0,
        "OomKillDisable": False,
        "OomScoreAdj": 500,
        "NanoCpus": limits.nano_cpus,
        "CpuShares": 512,
        "PidsLimit": limits.pids,
        "ShmSize": limits.shm,
        "Ulimits": [{"Name": n, "Soft": s, "Hard": h} for n, (s, h) in ULIMITS.items()],
        "Sysctls": dict(SYSCTLS),
        "MaskedPaths": list(MASKED_PATHS),
        "ReadonlyPaths": list(READONLY_PATHS),
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": True,
        "PublishAllPorts": False,
        "PortBindings": {},
        "Binds": None,
        "Devices": [],
        "DeviceRequests": [_device_request(device) for device in devices] or None,
        "VolumesFrom": None,
        "Links": None,
        "ExtraHosts": None,
        "GroupAdd": None,
    }
    if limits.runtime:
        body["Runtime"] = limits.runtime
    return body


def tmpfs_mounts(limits: Limits, volumes: tuple[str, ...]) -> dict[str, str]:
    """Return the memory-backed places and their options, each with bounds."""
    plain = "rw,nosuid,nodev,noexec"
    own = "mode=0700,uid=10001,gid=10001"
    # The image's content there is hidden.
    mounts = dict.fromkeys(volumes, f"{plain},size={VOLUME_SIZE},nr_inodes=4096,{own}")
    mounts[TMP] = f"{plain},size={limits.tmpfs},nr_inodes=32768,mode=1777"
    mounts[RUN] = f"{plain},size={RUN_SIZE},nr_inodes=1024,mode=0755"
    # Virtual environments run programs from home.
    mounts[HOME] = f"rw,nosuid,nodev,exec,size={limits.tmpfs},nr_inodes=32768,{own}"
    if limits.output:
        mounts[OUTPUT] = f"{plain},size={limits.output},nr_inodes=32768,{own}"
    if limits.project:
        # Filled by the control uid; the code's can only read it.
        theirs = "mode=0755,uid=10002,gid=10002"
        mounts[PROJECT] = f"rw,nosuid,nodev,exec,size={limits.project},nr_inodes=65536,{theirs}"
    return mounts


def lease_seconds(spec: SandboxSpec) -> int:
    """Return the lease's ttl in whole seconds, as the loop in the sandbox counts."""
    return math.ceil(spec.lease_ttl)


def idle_seconds(spec: SandboxSpec) -> int:
    """Return the time without use in whole seconds; 0 means that it has no end."""
    return 0 if spec.idle_ttl is None else math.ceil(spec.idle_ttl)


def grace_seconds(spec: SandboxSpec) -> int:
    """Return in whole seconds for how long the sandbox outlives its last holder."""
    return math.ceil(spec.resumable)


def lifetime_seconds(spec: SandboxSpec) -> int:
    """Return the lifetime in whole seconds; 0 means that it has no end."""
    return 0 if spec.max_lifetime is None else math.ceil(spec.max_lifetime)
