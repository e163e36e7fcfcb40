"""What can go wrong with a file, as codes that both sides understand.

The program in the sandbox reports one of these codes and the host makes an error of it; no
text is ever parsed. Standard library and Python 3.8, as this module is sent along.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

NOT_FOUND = 1
IS_LINK = 2
NOT_REGULAR = 3
IS_FOLDER = 4
NOT_FOLDER = 5
DENIED = 6
EXISTS = 7
DISK_FULL = 8
TOO_LARGE = 9
TOO_MANY = 10
TOO_DEEP = 11
BAD_NAME = 12
DUPLICATE = 13
NOT_EMPTY = 14
TOO_MUCH = 15
OTHER = 16

_OF_ERRNO = {
    errno.ENOENT: NOT_FOUND,
    errno.ELOOP: IS_LINK,
    errno.ENXIO: NOT_REGULAR,
    errno.EISDIR: IS_FOLDER,
    errno.ENOTDIR: NOT_FOLDER,
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: DENIED,
    errno.EEXIST: EXISTS,
    errno.ENOSPC: DISK_FULL,
    errno.EDQUOT: DISK_FULL,
    errno.EFBIG: TOO_LARGE,
    errno.ENAMETOOLONG: BAD_NAME,
    errno.EILSEQ: BAD_NAME,
    errno.ENOTEMPTY: NOT_EMPTY,
}


class TroubleError(Exception):
    """Something is wrong with a file: the one at `path`, or where that is empty the one asked for.

    `number` is an errno, or 0.
    """

    def __init__(self, code: int, path: str = "", number: int = 0) -> None:
        super().__init__(code, path, number)
        self.code = code
        self.path = path
        self.number = number


def trouble_of(error: OSError, path: str) -> TroubleError:
    """Return what an error of the operating system means for the file at ``path``."""
    number = error.errno or 0
    return TroubleError(_OF_ERRNO.get(number, OTHER), path, number)


@contextlib.contextmanager
def about(path: str) -> Iterator[None]:
    """Turn what the operating system says inside into trouble with the file at ``path``.

    Trouble that does not say which file it is about gets that path too.
    """
    try:
        yield
    except OSError as error:
        raise trouble_of(error, path) from error
    except TroubleError as trouble:
        trouble.path = trouble.path or path
        raise
