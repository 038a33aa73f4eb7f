"""Fixture of this folder: searches use little effort in every file that does not judge plans."""

from tests.effort import effort  # noqa: F401
