"""Errors of checkpoints, by kind."""


class CheckpointError(RuntimeError):
    """A checkpoint was not written, or cannot be used; the message says what to change."""


class ManifestError(CheckpointError):
    """A manifest that is torn, altered, or written by a newer ebbtide."""


class Cancelled(CheckpointError):  # noqa: N818 - not a fault
    """A running checkpoint gave way to a newer one (``checkpoint.busy: replace``)."""
