"""What goes wrong with state on storage."""


class StorageError(RuntimeError):
    """State on storage cannot be read, written or used; the message says what to change."""


class DamagedError(StorageError):
    """What was read is not what was written."""
