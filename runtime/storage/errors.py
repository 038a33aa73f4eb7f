"""Errors of optimizer state that is stored on a drive."""


class StorageError(RuntimeError):
    """Optimizer state on a drive cannot be read, written or used. The message says what to change."""


class DamagedError(StorageError):
    """Bytes of optimizer state that were read from a drive differ from the bytes that were written."""
