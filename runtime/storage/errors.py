"""Exceptions for optimizer state on a drive, for example when the state cannot be read or is damaged."""


class StorageError(RuntimeError):
    """An error for optimizer state on a drive that cannot be read, written or used. The message says what to change."""


class DamagedError(StorageError):
    """An error for optimizer state on a drive: the bytes that were read differ from the bytes that were written."""
