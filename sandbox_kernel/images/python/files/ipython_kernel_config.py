"""Give each new kernel matplotlib's list of fonts, which takes half a second to make.

The home of a sandbox is an empty tmpfs, so matplotlib would search the fonts again in each
sandbox. This runs as IPython configuration: it leaves no name in the person's namespace.
"""

import contextlib
import os
import pathlib
import shutil

_made = pathlib.Path("/opt/sandbox-kernel/matplotlib")
_wanted = os.environ.get("MPLCONFIGDIR")
if _wanted and _made.is_dir():
    with contextlib.suppress(OSError):  # matplotlib makes its own list then
        shutil.copytree(_made, _wanted, dirs_exist_ok=True)
