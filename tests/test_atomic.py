"""Files appear whole or not at all, whatever goes wrong while they are written."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import pytest

from lct.atomic import atomic_write, check_target


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_new_and_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        with atomic_write(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() != content
        assert path.read_bytes() == content
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_an_exception_keeps_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_mode_is_the_old_file_s_or_the_umask_s(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with atomic_write(tmp_path / "new") as file:
            file.write(b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o600)
    with atomic_write(tmp_path / "new") as file:
        file.write(b"y")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    target = tmp_path / "directory" / "target"
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    with atomic_write(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such directory.*missing"):
        check_target(tmp_path / "missing" / "file")
    with pytest.raises(OSError, match="output must be a regular file"):
        check_target(tmp_path)
    with pytest.raises(OSError, match="output must be a regular file"):
        check_target("/dev/null")
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="must not be overwritten"):
        check_target(tmp_path / "file", overwrite=False)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    if os.geteuid() == 0:
        # The superuser may write everywhere: ask as somebody who may not.
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"no permission to write .*file"):
        check_target(path)
    path.unlink()
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match="no permission to write into"):
            check_target(path)
    finally:
        tmp_path.chmod(0o755)


def test_no_space_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*file"), atomic_write(path) as f:
        f.write(b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_limit_of_file_size(tmp_path: Path) -> None:
    """A real failure in the middle of a write: the system stops at a size."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*file"), atomic_write(path) as file:
            file.write(bytes(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
