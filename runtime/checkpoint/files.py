"""The file functions of the checkpoint engine. All its system calls on files pass through this module.

Tests can thus record the calls, make each of them fail, or end the process between two of them.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


class Files:
    """The checkpoint engine's system calls on files, with one method per call.

    The object is thread-safe and has no state. Tests use subclasses that override two methods: `call`, to make calls
    fail, and `point`, to act at a named moment of a commit.
    """

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Make one system call of the checkpoint engine by calling ``function`` with ``args``."""
        return function(*args)

    def point(self, name: str) -> None:
        """Mark a named moment of a checkpoint's commit. Tests override this, for example to end the process there."""

    def _retry(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        while True:
            try:
                return self.call(name, function, *args)
            except InterruptedError:  # a signal came before anything was written
                continue

    def open(self, path: Path, flags: int) -> int:
        descriptor: int = self._retry("open", os.open, path, flags | os.O_CLOEXEC, 0o644)
        return descriptor

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        """Write bytes to a file. Return the number of bytes written, which may be less than the buffer's length."""
        written: int = self._retry("pwrite", os.pwrite, descriptor, data, offset)
        return written

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        self._retry("truncate", os.ftruncate, descriptor, size_bytes)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Allocate disk blocks for the first ``size_bytes`` bytes of a file."""
        self._retry("allocate", os.posix_fallocate, descriptor, 0, size_bytes)

    def fdatasync(self, descriptor: int) -> None:
        """Flush a file's data to disk. The file's length must not have changed."""
        # A failed flush is never retried, since the kernel may have dropped the unwritten pages.
        self._retry("fdatasync", os.fdatasync, descriptor)

    def fsync(self, descriptor: int) -> None:
        """Flush a file to disk. Never retry a failed flush, since the kernel may have dropped the unwritten pages."""
        self._retry("fsync", os.fsync, descriptor)

    def close(self, descriptor: int) -> None:
        with contextlib.suppress(InterruptedError):  # Linux closes the file even if a signal interrupts the call
            self.call("close", os.close, descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._retry("rename", os.rename, source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two files' or folders' names atomically. Return False if the filesystem does not support this."""
        try:
            self._retry("exchange", _renamed, one, other, _RENAME_EXCHANGE)
        except OSError as error:
            if error.errno in _NO_EXCHANGE:
                return False
            raise
        return True

    def rename_folder(self, source: Path, target: Path) -> bool:
        """Rename a folder unless ``target`` exists, and return whether it was renamed.

        A plain rename would replace an empty folder that another process has just made at ``target``. If the
        filesystem cannot rename on this condition, the target is made first and the content is moved into it.
        """
        try:
            self._retry("rename_folder", _renamed, source, target, _RENAME_NOREPLACE)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
            return self._filled(source, target)
        return True

    def _filled(self, source: Path, target: Path) -> bool:
        try:
            self._retry("mkdir", os.mkdir, target)
        except FileExistsError:
            return False
        for entry in list(source.iterdir()):
            self.rename(entry, target / entry.name)
        self.rmdir(source)
        return True

    def mkdir(self, path: Path) -> None:
        """Make a folder with its parents. An existing folder is not an error."""
        self._retry("mkdir", lambda p: p.mkdir(parents=True, exist_ok=True), path)

    def unlink(self, path: Path) -> None:
        self._retry("unlink", os.unlink, path)

    def rmdir(self, path: Path) -> None:
        self._retry("rmdir", os.rmdir, path)

    def read(self, path: Path) -> bytes:
        data: bytes = self._retry("read", Path.read_bytes, path)
        return data

    def pread(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Read from a file into a buffer. Return the number of bytes read, perhaps fewer than the buffer's length."""
        count: int = self._retry("preadv", os.preadv, descriptor, [data], offset)
        return count

    def read_into(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Read from a file until ``data`` is full or the file ends. Return the number of bytes read."""
        done = 0
        while done < len(data):
            count = self.pread(descriptor, data[done:], offset + done)
            if not count:
                break
            done += count
        return done

    def fsync_file(self, path: Path, flags: int = 0) -> None:
        """Flush a file to disk that this process has not opened."""
        descriptor = self.open(path, os.O_RDONLY | flags)
        try:
            self.fsync(descriptor)
        finally:
            self.close(descriptor)

    def fsync_folder(self, path: Path) -> None:
        """Flush a folder to disk, so that the names of its files are durable."""
        self.fsync_file(path, os.O_DIRECTORY)

    def write_durably(self, path: Path, data: bytes, point: str = "") -> None:
        """Replace the content of a small file completely or not at all. Return when the new content is on disk.

        Args:
            point: Name of this replacement for tests, which can interrupt it at two moments: at ``<point>_written``,
                before the new file takes the place of the old one, and at ``<point>_renamed``, after that. If empty,
                tests cannot interrupt it.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self._write(temporary, data, durably=True)
            if point:
                self.point(f"{point}_written")
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(temporary)  # a full disk would stay full
            raise
        if point:
            self.point(f"{point}_renamed")
        self.fsync_folder(path.parent)

    def write_briefly(self, path: Path, data: bytes) -> None:
        """Write a small file without flushing it to disk, so that a crash may lose it."""
        self._write(path, data, durably=False)

    def _write(self, path: Path, data: bytes, *, durably: bool) -> None:
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.write_all(descriptor, memoryview(data), 0)
            if durably:
                self.fsync(descriptor)
        finally:
            self.close(descriptor)

    def write_all(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write a whole buffer to a file. If a system call writes only a part, further calls write the rest."""
        while len(data):
            written = self.pwrite(descriptor, data, offset)
            if written <= 0:
                raise OSError(errno.EIO, "pwrite wrote nothing")
            data, offset = data[written:], offset + written

    def remove_tree(self, folder: Path) -> None:
        """Delete a folder and its content. Symbolic links are deleted but not followed, and neither is ``folder``."""
        if folder.is_symlink():
            self.unlink(folder)
            return
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.unlink(Path(entry.path))
        self.rmdir(folder)


def _renamed(one: Path, other: Path, flag: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        renameat2 = libc.renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, "no renameat2 in libc") from None
    source, target = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, source, _AT_FDCWD, target, flag) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))
