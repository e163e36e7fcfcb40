"""C3: what root sets up before a run, in a container of its own."""

from __future__ import annotations

from typing import Any

from tests.engines import Engines
from tests.magics.notebook import Notebook, no_sandbox_left, sandboxes


def setup_images(engines: Engines, prefix: str) -> list[dict[str, Any]]:
    """The images that were set up for the module's notebooks."""
    labels = ["io.sandbox-kernel.setup", f"io.sandbox-kernel.owner=tester-{prefix}"]
    return list(engines.api.get("/images/json", filters={"label": labels}))


def test_root_prepares_and_the_program_runs_without_it(
    notebook: Notebook, engines: Engines, prefix: str
) -> None:
    """C3: the files are there, the user is not root, and the image is gone afterwards."""
    cell = notebook.run(
        "_ = %sandbox_run --setup 'echo made > /opt/made; chown 10001 /opt/made' "
        "--setup 'useradd -m somebody' -- sh -c 'id -u; cat /opt/made; id -un somebody; "
        "touch /opt/x 2>&1; grep CapBnd /proc/self/status'",
        ok=True,
    )
    assert cell.out.startswith("10001\nmade\nsomebody\n")
    assert "Read-only file system" in cell.out
    assert "CapBnd:\t0000000000000000" in cell.out
    assert setup_images(engines, prefix) == []
    assert "sha256:" in notebook.ask("_sandbox.image")


def test_the_setup_has_only_what_installing_needs(notebook: Notebook) -> None:
    """C3: no network, a filter of system calls, no privilege to gain, few capabilities."""
    script = (
        'grep -E "^(CapBnd|Seccomp|NoNewPrivs):" /proc/self/status >/opt/t; '
        "tail -n +3 /proc/net/dev >>/opt/t; id -u >>/opt/t; "
        "mknod /opt/null c 1 3 2>>/opt/t || true; unshare -n true 2>>/opt/t || true"
    )
    out = notebook.run(f"_ = %sandbox_run --setup '{script}' -- cat /opt/t", ok=True).out
    # CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID.
    assert f"CapBnd:\t{(1 << 0) | (1 << 1) | (1 << 3) | (1 << 6) | (1 << 7):016x}" in out
    assert "Seccomp:\t2" in out
    assert "NoNewPrivs:\t1" in out
    assert "eth0" not in out
    assert out.count("Operation not permitted") == 2


def test_packages_of_the_system_can_be_installed(notebook: Notebook) -> None:
    """C3: by dpkg, with a script of the package's own; here without a network."""
    lines = (
        "mkdir -p /t/DEBIAN /t/usr/bin",
        "printf 'Package: hi\\nVersion: 1\\nArchitecture: all\\n' > /t/DEBIAN/control",
        "printf 'Maintainer: m\\nDescription: d\\n' >> /t/DEBIAN/control",
        "printf '#!/bin/sh\\necho hi there\\n' > /t/usr/bin/hi",
        "printf '#!/bin/sh\\nchown www-data /usr/bin/hi\\n' > /t/DEBIAN/postinst",
        "chmod 755 /t/usr/bin/hi /t/DEBIAN/postinst",
        "dpkg-deb -b /t /hi.deb",
        "dpkg -i /hi.deb",
    )
    notebook.run(f"setup = {'; '.join(lines)!r}", ok=True)
    line = "'-q --setup ' + __import__('shlex').quote(setup) + ' hi'"
    notebook.run(f"r = get_ipython().run_line_magic('sandbox_run', {line})", ok=True)
    assert notebook.ask("r.stdout") == "hi there\n"


def test_a_setup_that_fails_runs_nothing(notebook: Notebook, engines: Engines, prefix: str) -> None:
    """C3: the error shows the last lines; nothing is left."""
    cell = notebook.run("%sandbox_run --setup 'echo why >&2; exit 9' -- echo never")
    assert cell.error[0] == "SandboxStartError"
    assert "code 9" in cell.error[1]
    assert "why" in cell.error[1]
    assert "never" not in cell.out
    assert setup_images(engines, prefix) == []


def test_stop_ends_a_setup(notebook: Notebook, engines: Engines, prefix: str) -> None:
    """C3: in the midst of it; no container and no image stays."""
    pressed: list[bool] = []

    def press(cell: Any) -> None:
        busy = [c for c in sandboxes(engines, prefix) if c["State"] == "running"]
        if not pressed and busy:
            pressed.append(True)
            notebook.manager.interrupt_kernel()

    cell = notebook.run("%sandbox_run --setup 'sleep 1000' -- true", seen=press)
    assert cell.error[0] == "KeyboardInterrupt"
    no_sandbox_left(engines, prefix)
    assert setup_images(engines, prefix) == []


def test_the_session_is_never_set_up(notebook: Notebook) -> None:
    """C3: root does not run where code of the user did."""
    cell = notebook.run("%%sandbox --setup true\ntrue")
    assert cell.error[0] == "UsageError"
    assert "--fresh" in cell.error[1]


def test_the_question_shows_what_root_runs(notebook: Notebook) -> None:
    """C5: the network of a setup is that of its run."""
    code = "%sandbox_run -n --setup 'apt-get install evil' -- true"
    cell = notebook.run(code, answers=["no"])
    assert "as root: apt-get install evil" in cell.asked[0]
    assert cell.error[0] == "SandboxNetworkDenied"
