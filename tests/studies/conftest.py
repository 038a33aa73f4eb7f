"""Fixture for the tests of the studies: plan searches use little effort."""

from tests.effort import effort  # noqa: F401
