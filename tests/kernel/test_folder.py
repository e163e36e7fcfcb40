"""The folder of a kernel's sockets: private, and not left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sandbox_kernel.kernel.folder import PrivateFolder, remove_abandoned


def test_only_its_user_can_enter_it(tmp_path: Path) -> None:
    """Decision 6."""
    folder = PrivateFolder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    usual = PrivateFolder()
    assert len(str(usual.path / "k-65535")) < 100
    usual.remove()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_folders_of_dead_owners_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    """B13: nothing can clean up after a kill -9 but the next one who comes."""
    code = (
        "import os, sys, pathlib\n"
        "from sandbox_kernel.kernel.folder import PrivateFolder\n"
        "print(PrivateFolder(pathlib.Path(sys.argv[1])).path, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    mine = PrivateFolder(tmp_path)
    killed = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    abandoned = Path(killed.stdout.strip())
    assert abandoned.exists()
    foreign = tmp_path / "sbx-without-a-lock"
    foreign.mkdir()
    remove_abandoned(tmp_path)
    assert not abandoned.exists()
    assert mine.path.exists()
    assert foreign.exists()
    mine.remove()
