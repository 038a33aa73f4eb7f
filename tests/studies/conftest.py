"""Searches with little effort in every file of this folder that does not judge plans."""

from tests.effort import effort  # noqa: F401
