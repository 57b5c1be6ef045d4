"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# The system raises these for a write, without saying to which file.
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(path: str | os.PathLike[str], *, overwrite: bool = True) -> Path:
    """The real path that ``atomic_write`` would replace. OSError where it could not be written.

    Called early, so that a long run does not fail at its last step.
    """
    # A symbolic link stays one: what it points to is replaced, as a plain write would do.
    target = Path(os.path.realpath(path))
    if target.exists():
        if not stat.S_ISREG(target.stat().st_mode):
            raise OSError(f"output must be a regular file, got {str(path)!r}")
        if not overwrite:
            raise FileExistsError(
                f"output exists already and must not be overwritten: {str(path)!r}"
            )
        if not os.access(target, os.W_OK):
            raise PermissionError(f"no permission to write {str(path)!r}")
    directory = target.parent
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {str(directory)!r}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"no permission to write into {str(directory)!r}")
    return target


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """A binary file that takes the place of ``path`` when the block ends, or leaves it as it was.

    Written beside ``path`` under a hidden name, flushed to the disk, then renamed: a reader or a
    crash finds the old file or the new one. On an exception the hidden file is removed.
    """
    target = check_target(path, overwrite=overwrite)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        # 0o666 and the umask give what a plain write would have given (mkstemp's 0o600 does not).
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and error.filename is None:
            error.filename = str(path)
        raise
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
    """Make a rename durable where the file system can sync a directory."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
