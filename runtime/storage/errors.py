"""Errors of stored state."""


class StorageError(RuntimeError):
    """State on storage cannot be read, written or used; the message says what to change."""


class DamagedError(StorageError):
    """Stored bytes that differ from the written ones."""
