"""A fixture that reduces the effort of the plan search for most tests."""

import pytest
from ebbtide.tuner.placements.search import Search

LITTLE = 0.05
# These files judge plans, or compare them with those of another process.
IN_EARNEST = ("test_golden", "test_speculation", "test_optimum", "test_annealing")


@pytest.fixture(autouse=True, scope="module")
def effort(request):
    """Reduce the effort of the plan search for a test, except in the test files that judge plans."""
    with pytest.MonkeyPatch.context() as patch:
        package, _, name = request.module.__name__.rpartition(".")
        if name not in IN_EARNEST and not package.endswith(".service"):
            patch.setattr(Search, "effort", LITTLE)
        yield
