"""A fixture for the tuner's tests that reduces the effort of plan searches, except in tests that judge the plans."""

from tests.effort import effort, in_earnest  # noqa: F401
