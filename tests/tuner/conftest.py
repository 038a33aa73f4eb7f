"""Fixture for the tuner's tests: a plan search uses little effort, unless a test judges its plans."""

from tests.effort import effort  # noqa: F401
