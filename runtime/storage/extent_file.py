"""The file on a drive that holds optimizer state. Its space is allocated in advance, and it bypasses the page cache."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.stream.persist import NO_DIRECT, OutputFile
from ebbtide.runtime.storage.errors import StorageError


class ExtentFile(OutputFile):
    """A file of optimizer state on a drive. Any thread may read and write aligned blocks of the file.

    The space of the file is allocated in advance (`reserve`).

    Raises:
        StorageError: A method failed. The message has the system's error and the file.
    """

    def __init__(self, path: Path, size_bytes: int, files: Files) -> None:
        super().__init__(path, size_bytes, files)
        self.path = path

    def reserve(self) -> None:
        """Allocate the disk space of a file of optimizer state early, so that no later write finds the disk full."""
        try:
            folder = os.statvfs(self.path.parent)
            held = self.path.stat().st_blocks * 512 if self.path.exists() else 0
            free = folder.f_bavail * folder.f_frsize + held
            if free < self._size:
                raise StorageError(
                    f"{self.path.parent} must have {self._size} bytes free for the optimizer state that the plan "
                    f"stores in this folder, but has {free}. Free space, set another plan.storage_dir, store fewer "
                    "subgroups, or lower checkpoint.keep"
                )
            descriptor = self._open_buffered()
            self._files.truncate(descriptor, self._size)
            if self._size:
                self._files.allocate(descriptor, self._size)
            self._files.fsync(descriptor)
            self._files.fsync_folder(self.path.parent)  # also makes the file's name durable, which no manifest repeats
        except OSError as error:
            raise self._explain(error) from error

    def grow(self, size_bytes: int) -> None:
        """Enlarge a file of optimizer state and allocate the new disk space. The present content is kept."""
        self._size = size_bytes
        self.reserve()

    def check(self) -> None:
        """Check that a file of optimizer state still exists and has at least the size that was reserved for it."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < self._size:
            raise self._cut_short(size)

    def read(self, data: memoryview, offset: int) -> None:
        """Fill a buffer from a file of optimizer state. ``data`` and ``offset`` must be aligned for direct I/O."""
        done, descriptor = 0, self._open_direct()
        try:
            if descriptor is not None:
                try:
                    done = self._files.pread(descriptor, data, offset)
                except OSError as error:
                    if error.errno not in NO_DIRECT:
                        raise
            if done < len(data):
                done += self._files.read_into(self._open_buffered(), data[done:], offset + done)
        except OSError as error:
            raise self._explain(error, "reading") from error
        if done < len(data):
            raise self._cut_short(offset + done)

    def _cut_short(self, size_bytes: int) -> StorageError:
        return StorageError(
            f"{self.path} must have {self._size} bytes, but has {size_bytes}: it was deleted or "
            "truncated. Restore it, or resume from a checkpoint in another folder"
        )

    def sync(self) -> None:
        """Wait until all data written to a file of optimizer state is on the disk."""
        try:
            self._files.fdatasync(self._open_buffered())
        except OSError as error:
            raise self._explain(error, "syncing") from error

    @property
    def descriptor(self) -> int:
        """Return a file descriptor with which a file of optimizer state can be mapped into memory."""
        return self._open_buffered()

    def close(self) -> None:
        """Close a file of optimizer state. Errors are ignored, because all committed data was synced before."""
        with contextlib.suppress(OSError):
            super().close()

    def _explain(self, error: OSError, doing: str = "writing") -> Exception:
        return StorageError(
            f"{doing} {self.path} failed: {error.strerror or error} "
            f"({errno.errorcode.get(error.errno or 0, error.errno)}). "
            "Checkpoints that were committed before this failure are intact. Check the drive, then resume"
        )
