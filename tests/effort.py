"""A fixture that reduces the effort of the plan search in most tests. In some test files it also caches the
search's results, so that a search with equal arguments runs only once per file.
"""

import pickle
from dataclasses import asdict

import pytest
from ebbtide.tuner.placements import planning
from ebbtide.tuner.placements.search import Search

LITTLE = 0.05
# These files judge plans, or compare them with those of another process.
IN_EARNEST = ("test_golden", "test_speculation", "test_optimum", "test_annealing")
# These files test what is done with a plan, most often with the same one.
KEPT = ("test_inputs", "test_option_walk", "test_cli", "test_first_contact", "test_plans_fit")


def kept(decide):
    """Return a caching version of `decide`, the function that searches for the best plan of a training job.

    `decide` takes a `Question` as its first argument. A call with a `Question` that equals an earlier call's
    returns the earlier result without a search.
    """
    found = {}

    def decided(question, *progress):
        key = pickle.dumps(asdict(question))
        if key not in found:
            found[key] = decide(question, *progress)
        return found[key]

    return decided


@pytest.fixture(autouse=True, scope="module")
def effort(request):
    """Reduce the effort of the plan search for a test, except in the test files that judge plans."""
    with pytest.MonkeyPatch.context() as patch:
        package, _, name = request.module.__name__.rpartition(".")
        if name not in IN_EARNEST and not package.endswith(".service"):
            patch.setattr(Search, "effort", LITTLE)
        if name in KEPT:
            patch.setattr(planning, "decide", kept(planning.decide))
        yield
