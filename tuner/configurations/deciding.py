"""The search for the fastest training configuration, in the order of upper bounds of the speed."""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ebbtide.tuner.advice.tried import Tried
from ebbtide.tuner.candidates.cuts import SIZES
from ebbtide.tuner.configurations.answer import Answer
from ebbtide.tuner.configurations.evaluation import Outcome, Question
from ebbtide.tuner.configurations.space import Configuration, Space
from ebbtide.tuner.placements.decision import FULL

MOST = 16  # most plan searches of `tune search`. DeepSpeed alone is simulated in a moment, which does not count
SLACK = 0.002  # share of the best speed. A configuration whose bound gains less is not simulated


def explore(
    question: Question, space: Space, *, trials: int = MOST, progress: Callable[[int, int], object] = lambda *_: None
) -> Answer:
    """Find the fastest training configuration.

    Configurations are taken in the order of an upper bound of their speed. The search ends when the next bound is not
    above the best speed. The fastest configuration gets the plan that `tune plan` finds.

    Args:
        trials: Most plan searches. With more configurations to try, the answer is not complete.
        progress: Called with the number of plan searches, and the largest possible number.

    Raises:
        ValueError: trials < 1, more memory is requested than the machine has, or no configuration can be simulated.
    """
    if trials < 1:
        raise ValueError(f"--trials must be >= 1, but got {trials}")
    sizes = SIZES if "sub_group_size" in space.free else ()
    jobs, refused = dict[Configuration, Tried](), Counter[str]()
    for c in space:
        tried = question.tried(c, sizes)
        if isinstance(tried, str):
            refused[tried] += 1
        else:
            jobs[c] = tried
    if not jobs:
        raise ValueError(next(iter(refused)))
    outcomes = dict[Configuration, Outcome]()
    turns = [(-_speed(tried, tried.least_s), number, False) for number, tried in enumerate(jobs.values())]
    heapq.heapify(turns)
    every, best, searches = list(jobs.items()), 0.0, 0
    while turns and -turns[0][0] > best * (1 + SLACK):
        _, number, bounded = heapq.heappop(turns)
        c, tried = every[number]
        if tried.unfit is not None:
            outcomes[c] = question.outcome(c, tried)
        elif not bounded:
            heapq.heappush(turns, (-_speed(tried, tried.bound_s), number, True))
        elif searches == trials and tried.alone is None:
            heapq.heappush(turns, (-_speed(tried, tried.bound_s), number, True))
            break
        else:
            searches += tried.alone is None
            progress(searches, trials)
            outcomes[c] = question.outcome(c, tried)
            best = max(best, outcomes[c].tokens_per_s if outcomes[c].fits else 0.0)
    left = {}
    for bound, number, _ in turns:
        c, tried = every[number]
        if tried.alone is not None and tried.unfit is not None:  # told as not fitting, and not as not tried
            outcomes[c] = question.outcome(c, tried)
        else:
            left[c] = -bound
    complete = not any(bound > best * (1 + SLACK) for bound in left.values())
    answer = Answer(space, tuple(outcomes.values()), complete, refused, len(every) + refused.total(), left=left)
    return _finished(question, answer, jobs)


def _speed(tried: Tried, seconds: float) -> float:
    return (tried.workload.tokens_per_iteration or 0) / seconds


def _finished(question: Question, answer: Answer, jobs: dict[Configuration, Tried]) -> Answer:
    """Return the answer with the plan of a full search for the fastest configuration."""
    if not answer.fitting:
        return answer
    first = answer.fitting[0]
    if first.plan is not None:
        c = next(c for c in jobs if c.changed(sub_group_size=first.configuration.sub_group_size) == first.configuration)
        full = question.outcome(c, jobs[c], FULL, few=False)
        if full.fits and full.iteration_s <= first.iteration_s:
            answer = replace(answer, outcomes=(full, *(o for o in answer.outcomes if o is not first)))
    return replace(answer, spread=question.spread(answer.fitting[0]))
