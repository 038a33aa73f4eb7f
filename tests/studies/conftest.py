"""Fixtures for the tests of the studies, which reduce the effort of plan searches and of garbage collections."""

from tests.effort import effort  # noqa: F401
from tests.runtime.conftest import quick_collections  # noqa: F401
