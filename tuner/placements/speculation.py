"""How many updates begin before the norm is known, on the guess that the step does not clip.

EarlyUpdates take host memory, and a step that clips makes all of them wrong. So they are planned for
where somebody says how many steps do (`Workload.clip_rate`), and where the mean iteration is
shorter by more than nothing. What was said may be wrong: while its guesses pause, such a plan is
nearly as quick as the best one without.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ebbtide.simulator.plan import Plan
from ebbtide.simulator.update.recipes import RECIPES
from ebbtide.tuner.placements.moves import STAGED
from ebbtide.tuner.placements.search import SPECULATES, Candidate, Search
from ebbtide.tuner.quantities import told_seconds

WORTH = 2e-3  # of an iteration: less is not worth the memory
LITTLE = 0.1  # effort: with no more than it, plans with early updates begin from those without
FEW = 8  # of the best plans without guesses, with which the search begins
ROOM = 3  # subgroups that no longer stay on the device, at the most, for visits that are guessed
PARTS = 8  # of the best plan's guesses, or sums: how fine their number is chosen
SPREADS = 4  # likewise of how far apart they are


def may_update_early(search: Search) -> bool:
    """Return whether plans of this search may update early.

    The runtime can do so under ZeRO-3. Without any step that does not clip it never pays.
    """
    work = search.workload
    return work.zero_stage == 3 and not search.machine.unified_memory and work.expected_clip_rate < 1


def with_early_updates(
    plain: Search, chosen: Candidate, improve: Callable[[Search], object], more: Sequence[Candidate] = ()
) -> tuple[Search, Candidate]:
    """Return the search whose plans guess, and its best with as few guesses as serve; or what is given,
    where that is no worse.
    """
    search = Search(
        plain.workload,
        plain.machine,
        plain.limits,
        plain.seed,
        plain.fixed,
        plain.locations,
        plain.storable,
        speculates=True,
        effort=plain.effort,
    )
    most: dict[str, Any] = dict.fromkeys(SPECULATES.values())
    known = sorted(plain.scores, key=lambda c: plain.scores[c].iteration_s)
    for candidate in (chosen, *known[:FEW]):
        search.score(replace(candidate, speculate=None, speculate_visits=0))
        for roomier in _with_room(candidate):
            search.score(replace(roomier, **most))
    for candidate in more:
        search.score(candidate)
        search.score(replace(candidate, **most))
    if plain.effort > LITTLE or not search.fits:
        search.try_first()
    if not search.fits:
        return plain, chosen
    _spread(search)
    improve(search)
    _spread(search)
    best = search.best()
    for name in SPECULATES.values():
        best = fewest(search, best, name)
    faster = search.score(best).iteration_s < (1 - WORTH) * plain.score(chosen).iteration_s
    return (search, best) if faster else (plain, chosen)


def _with_room(candidate: Candidate) -> Iterator[Candidate]:
    """As it is, and with device memory left for the new parameters of guessed visits: with the last
    ones that stay there visiting it, or fewer slots.
    """
    yield candidate
    placements = list(candidate.placements)
    if STAGED.isdisjoint(placements):
        return
    slots = range(1, candidate.staging_slots)
    yield from (replace(candidate, staging_slots=n, prefetch=min(n, candidate.prefetch)) for n in slots)
    stay = [i for i, p in enumerate(placements) if RECIPES[p].state == "device"]
    for subgroup in stay[: -ROOM - 1 : -1]:
        placements[subgroup] = next(p for p in placements if p in STAGED)
        yield replace(candidate, placements=tuple(placements))


def _spread(search: Search) -> None:
    """As many guesses as the best has, and fewer, closer together and less close."""
    best = search.ordered(search.best())
    count = len(best.placements)
    for many in sorted({(best.speculate or 0) * i // PARTS for i in range(1, PARTS + 1)} - {0}):
        for among in sorted({many + (count - many) * i // SPREADS for i in range(SPREADS + 1)}):
            search.score(replace(best, speculate=many, speculate_among=among))


def fewest(search: Search, best: Candidate, name: str) -> Candidate:
    """Return the candidate with the lowest value of ``name`` that costs next to nothing."""
    most = getattr(best, name) or 0
    numbers: list[Any] = sorted({most * i // PARTS for i in range(PARTS)})
    tried = [replace(best, **{name: n}) for n in numbers]
    least_s = search.score(best).iteration_s
    near = (c for c in tried if search.score(c).iteration_s <= (1 + WORTH / 2) * least_s)
    return next(near, best)


def about_early_updates(search: Search, made: Plan, plain_s: float) -> list[str]:
    """Return a sentence about the updates that begin before the norm. None below ZeRO-3."""
    count, work, told = sum(made.updated_early), search.workload, made.prediction
    if told is None or not may_update_early(search):
        return []
    rate = f"{work.expected_clip_rate:.1%} of the steps clip"
    if work.clip_rate is None:
        rate = f"{work.expected_clip_rate:.0%} of the steps clip (assumed, see --clip-rate)"
    times = told.step_times
    if not count or times is None:
        return [f"no subgroup is updated early (before the gradient norm is known): it is not faster if {rate}"]
    return [
        f"{count} of {made.subgroup_count} subgroups are updated early (before the gradient norm is known), "
        f"which saves {told_seconds(plain_s - told.iteration_s)} if {rate}. An iteration takes "
        f"{told_seconds(times.right_s)} if no step clips, and {told_seconds(times.mean_s(1.0))} if every step clips"
    ]
