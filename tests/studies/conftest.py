"""A fixture for the tests of the studies, which reduces the effort of plan searches."""

from tests.effort import effort  # noqa: F401
