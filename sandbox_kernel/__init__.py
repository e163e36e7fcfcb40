"""sandbox-kernel: Jupyter kernels and notebook commands in hardened containers.

Importing this package loads no engine and no Jupyter code, so that listing kernelspecs and
loading the magics stay cheap; the public names are resolved on first use.
"""

from __future__ import annotations

__version__ = "0.1.0"
