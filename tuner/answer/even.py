"""A quick plan: the best first guess, evenly spread, without the local search."""

from ebbtide.simulator.limits import Limits
from ebbtide.simulator.machine import Machine
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.workload import Workload
from ebbtide.tuner.answer.verdict import distance
from ebbtide.tuner.placements.homes import begun, brought
from ebbtide.tuner.placements.memory import ImpossibleError
from ebbtide.tuner.placements.planning import predict
from ebbtide.tuner.placements.search import Search


def even_plan(workload: Workload, machine: Machine, limits: Limits) -> Plan:
    """Return the plan with its prediction and the lower bound. It says whether a search could find a better one.

    Raises:
        ImpossibleError: nothing fits.
    """
    search = begun(workload, machine, limits)
    if not search.fits:
        raise ImpossibleError.explain(workload, limits, list(search.scores.values()))
    return best_of(search)


def best_of(search: Search) -> Plan:
    """Return the best plan of a started search that found one that fits."""
    workload, machine, limits = search.workload, search.machine, search.limits
    made = search.best().plan(workload)
    # The fluid bound alone: somebody waits, and the whole one takes seconds.
    prediction = predict(workload, machine, made, limits, lambda _: search.fluid.iteration_s)
    best = distance(prediction) == "at the optimum"
    more = "no search finds a better one" if best else "the search may find a better one"
    why = f"a quick plan, evenly spread: {more}"
    return made.model_copy(update={"prediction": prediction, "reasons": (why, *brought(search))})
