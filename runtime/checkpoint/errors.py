"""The errors of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint was not written, or cannot be used. The message says what to change."""


class ManifestError(CheckpointError):
    """A checkpoint's manifest is torn, altered, or written by a newer version of ebbtide."""


class Cancelled(CheckpointError):  # noqa: N818 - not a fault
    """A running checkpoint was cancelled in favor of a newer one (``checkpoint.busy: replace``)."""
