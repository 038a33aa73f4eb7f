"""A fixture that shortens the plan search in all tests but those that judge plans. In some test files it also caches
the search's results, so that a search with equal arguments runs only once per file.
"""

import pickle
from dataclasses import asdict

import pytest
from ebbtide.tuner.placements import decision, planning

from tests.cheap_start.short_search import SHORT, changes

# These files test plans themselves, or compare them with those of another process, so they need the full search.
IN_EARNEST = (
    "test_annealing",
    "test_decision",
    "test_golden",
    "test_laws",
    "test_optimum",
    "test_random_laws",
    "test_speculation",
)
# These files test how plans are used, often with the same plan, so results of searches are kept.
KEPT = ("test_inputs", "test_option_walk", "test_cli", "test_first_contact", "test_plans_fit")


WHOLE = [(module, name, getattr(module, name)) for module, name, _ in changes(decision)]
WHOLE.append((planning, "decide", planning.decide))


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
    """Shorten the plan search for a test and its child processes, except in the test files that judge plans."""
    with pytest.MonkeyPatch.context() as patch:
        name = request.module.__name__.rpartition(".")[2]
        if name not in IN_EARNEST:
            for module, attribute, value in changes(decision):
                patch.setattr(module, attribute, value)
            patch.setenv(SHORT, "1")
        if name in KEPT:
            patch.setattr(planning, "decide", kept(planning.decide))
        yield


@pytest.fixture
def in_earnest(monkeypatch):
    """Let one test run the full plan search that users get, although the other tests of its file run a short one."""
    for module, name, value in WHOLE:
        monkeypatch.setattr(module, name, value)
    monkeypatch.delenv(SHORT, raising=False)
