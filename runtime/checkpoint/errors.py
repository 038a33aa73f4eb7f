"""The exceptions that saving and loading checkpoints raises."""


class CheckpointError(RuntimeError):
    """An error: a checkpoint was not written, or cannot be used. The message says what to change."""


class ManifestError(CheckpointError):
    """An error: a checkpoint's manifest is incomplete, altered, or written by a newer version of ebbtide."""


class Cancelled(CheckpointError):  # noqa: N818 - not a fault
    """An error: a checkpoint in progress was cancelled because a newer one began (setting
    ``checkpoint.busy: replace``).
    """
