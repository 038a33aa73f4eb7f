"""A short plan search, for tests that use plans and do not judge them.

If the environment variable `SHORT` is "1" in a child process of a test, plan searches in that process are also short:
sitecustomize.py beside this file makes them so.
"""

SHORT = "TESTS_SHORT_SEARCH"
CHANGES = 10  # most changes of a plan in each descent
EVALUATIONS = 10  # evaluations of each annealing
POINTS = 10  # numbers of subgroups per placement that are tried first


def changes(decision):
    """Return the changes that make the plan search short, as a list of (module, name, value).

    A short search has all stages of a full one, but tries only a few plans in each stage.

    Args:
        decision: The module `ebbtide.tuner.placements.decision`.
    """
    from ebbtide.tuner.placements import shares

    anneal = decision.anneal

    def annealed(searched, evaluations=EVALUATIONS):
        anneal(searched, min(EVALUATIONS, evaluations))

    return [(decision, "anneal", annealed), (decision, "DESCENT", CHANGES), (shares, "MOST_POINTS", POINTS)]


def shorten(decision):
    """Make every plan search in this process short, so that tests that do not judge plans run faster."""
    for module, name, value in changes(decision):
        getattr(module, name)  # fails if the name was changed, so that the list above is corrected
        setattr(module, name, value)
