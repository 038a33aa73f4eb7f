"""The effort of the searches in tests."""

import pytest
from ebbtide.tuner.placements.search import Search

LITTLE = 0.05
# These files judge plans. A search that finds no good plan must fail them.
IN_EARNEST = ("test_golden", "test_speculation", "test_optimum", "test_annealing")


@pytest.fixture(autouse=True, scope="module")
def effort(request):
    """Search with little effort, except in the files that judge plans."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] not in IN_EARNEST:
            patch.setattr(Search, "effort", LITTLE)
        yield
