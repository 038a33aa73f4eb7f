"""The choice of the early updates: updates that start before the gradient norm is known.

Early updates assume that the step does not clip gradients. They take host memory, and a step that clips
must undo and repeat all of them. So a plan has early updates only if they shorten the mean iteration. If
more steps clip than expected, the runtime stops early updates for a while. The plan is then nearly as
fast as the best plan without early updates.
"""

from collections.abc import Iterator
from dataclasses import replace

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.simulator.update.way import EARLY, SUMMED
from ebbtide.tuner.placements.candidate import STAGED, Candidate, able_early, turned
from ebbtide.tuner.placements.search import Search
from ebbtide.tuner.quantities import seconds_text

FEW = 3  # number of best plans without early updates from which the search starts
ROOM = 3  # most GPU-resident subgroups that may leave the GPU to make room for early staged updates
PARTS = 8  # number of steps from no early update to all of them
SPREADS = 4  # number of steps from neighboring early updates to evenly spread ones
LITTLE = 5e-4  # share of an iteration. Early updates and on-device sums that save less are left out


def try_early(search: Search) -> None:
    """Try plans with early updates in a plan search.

    Early updates of more or fewer subgroups are also tried.
    """
    if not (search.early and search.fits):
        return
    known = sorted((c for c in search.scores if not c.count(EARLY)), key=lambda c: search.scores[c].iteration_s)
    for candidate in known[:FEW]:
        search.score(search.with_early(candidate, ["host"]))
        for roomier in _with_room(candidate):
            search.score(search.with_early(roomier))
    _spread(search)


def _with_room(candidate: Candidate) -> Iterator[Candidate]:
    yield candidate
    placements = list(candidate.placements)
    if STAGED.isdisjoint(placements):
        return
    slots = range(1, candidate.staging_slots)
    yield from (replace(candidate, staging_slots=n, prefetch=min(n, candidate.prefetch)) for n in slots)
    stay = [i for i, p in enumerate(placements) if RECIPES[p].state == "device"]
    for subgroup in stay[: -ROOM - 1 : -1]:
        placements[subgroup] = next(p for p in placements if p in STAGED)
        yield candidate.with_placements(placements)


def _spread(search: Search) -> None:
    best = search.ordered(search.best())
    able = able_early(best, "host").tolist()
    early = [s for s in able if best.ways[s] & EARLY]
    others, count = turned(best, early, EARLY), len(able)
    for many in sorted({len(early) * i // PARTS for i in range(1, PARTS + 1)} - {0}):
        for among in sorted({many + (count - many) * i // SPREADS for i in range(SPREADS + 1)}):
            search.score(turned(others, [able[-1 - i * among // many] for i in range(many)], EARLY))


def fewest(search: Search, best: Candidate) -> Candidate:
    """Return a copy of a plan without the early updates and on-device gradient sums that together save at
    most 0.05% of the iteration time.
    """
    best = search.ordered(best)
    most_s = (1 + LITTLE) * search.score(best).iteration_s
    for bit in (EARLY, SUMMED):
        for parts in (1, 2, PARTS):
            some = [s for s, code in enumerate(best.ways) if code & bit]
            for part in range(parts):
                fewer = turned(best, some[len(some) * part // parts : len(some) * (part + 1) // parts], bit)
                if search.score(fewer).iteration_s <= most_s:
                    best = search.ordered(fewer)
    return best


def about_early_updates(search: Search, made: Plan) -> list[str]:
    """Return a list with one sentence about a plan's early updates and the time that they save over the search's best
    plan without them.

    The list is empty if the job cannot have early updates, as under ZeRO-1.
    """
    count, work, prediction = sum(made.updated_early), search.workload, made.prediction
    if prediction is None or not search.early:
        return []
    rate = f"{work.expected_clip_rate:.1%} of the steps clip"
    if work.clip_rate is None:
        rate = f"{work.expected_clip_rate:.0%} of the steps clip (assumed)"
    times = prediction.step_times
    if not count or times is None:
        return [f"no subgroup is updated early (before the gradient norm is known): it is not faster if {rate}"]
    return [
        f"{count} of {made.subgroup_count} subgroups are updated early (before the gradient norm is known), "
        f"which saves {seconds_text(search.plain_s - prediction.iteration_s)} if {rate}. An iteration takes "
        f"{seconds_text(times.right_s)} if no step clips, and {seconds_text(times.mean_s(1.0))} if every step clips"
    ]
