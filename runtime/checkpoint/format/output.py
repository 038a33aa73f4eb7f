"""A file of a checkpoint while it is being written, and the limit on the rate of checkpoint writes."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.files import Files

NO_DIRECT = {errno.EINVAL, errno.ENOTSUP}


class OutputFile:
    """A checkpoint file to which any thread writes aligned blocks. It bypasses the page cache if the filesystem allows.

    `make_durable` removes the padding of the last block and returns once the bytes are on disk.
    """

    def __init__(self, path: Path, size_bytes: int, files: Files, *, direct: bool = True) -> None:
        self._path = path
        self._size = size_bytes
        self._files = files
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._buffered: int | None = None
        self._try_direct = direct and hasattr(os, "O_DIRECT")

    def write(self, data: memoryview, offset: int) -> None:
        """Write a block to a checkpoint's file. ``data`` and ``offset`` must be aligned for direct I/O.

        ``data`` may extend past the file's final length.
        """
        descriptor = self._open_direct()
        if descriptor is not None:
            try:
                written = self._files.pwrite(descriptor, data, offset)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise self._explain(error) from error
                written = 0
            data, offset = data[written:], offset + written
        # The whole block if the file system does not support O_DIRECT. Otherwise the rest of a short write, which may
        # be unaligned.
        if len(data):
            try:
                self._files.write_all(self._open_buffered(), data, offset)
            except OSError as error:
                raise self._explain(error) from error

    def make_durable(self) -> None:
        """Set the final length of this checkpoint file, and wait until its bytes are on disk."""
        try:
            descriptor = self._open_buffered()
            self._files.truncate(descriptor, self._size)
            self._files.fsync(descriptor)
            self.close()
        except OSError as error:
            raise self._explain(error) from error

    def close(self) -> None:
        with self._lock:
            held, self._direct, self._buffered = (self._direct, self._buffered), None, None
        for descriptor in held:
            if descriptor is not None:
                self._files.close(descriptor)

    def _open_direct(self) -> int | None:
        with self._lock:
            if self._direct is None and self._try_direct:
                try:
                    self._direct = self._files.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in NO_DIRECT:
                        raise self._explain(error) from error
                    self._try_direct = False
            return self._direct

    def _open_buffered(self) -> int:
        with self._lock:
            if self._buffered is None:
                self._buffered = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
            return self._buffered

    def _explain(self, error: OSError) -> Exception:
        return CheckpointError(
            f"writing {self._path} failed: {error.strerror or error} "
            f"({errno.errorcode.get(error.errno or 0, error.errno)}). This checkpoint is abandoned, "
            "earlier ones are intact"
        )


class Pace:
    """A limit, in bytes per second, on the rate at which all writer threads of checkpoints together write.

    A rate of None means no limit.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, size_bytes: int, hurry: Callable[[], bool]) -> None:
        """Wait until the limit on the rate of checkpoint writes allows a write of ``size_bytes``.

        Args:
            hurry: Function that returns whether to end the wait early, because an update waits for the
                bytes or the checkpoint has failed.
        """
        if self._bytes_per_s is None:
            return
        with self._lock:
            start = max(time.monotonic(), self._free_s)
            self._free_s = start + size_bytes / self._bytes_per_s
        while not hurry():
            left = start - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))
