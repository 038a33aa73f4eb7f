"""The search for the fastest training configuration, in the order of upper bounds of the speed, and the measurement of
the fastest ones.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ebbtide.tuner.advice.tried import Tried
from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome, SearchQuestion
from ebbtide.tuner.configurations.measuring import LIMIT_S, Measurement, key_of, measure
from ebbtide.tuner.configurations.search_answer import SearchAnswer
from ebbtide.tuner.configurations.space import Configuration, Space
from ebbtide.tuner.configurations.study import Trials
from ebbtide.tuner.placements.decision import FULL, SIZES

MOST = 16  # most plan searches of `tune search`. DeepSpeed alone is simulated in a moment, which does not count
SLACK = 0.002  # share of the best speed. A configuration whose bound gains less is not simulated


def explore(
    question: SearchQuestion,
    space: Space,
    *,
    trials: int = MOST,
    best: int = 1,
    usable: Callable[[ConfigurationOutcome], bool] = lambda _: True,
    study: str | None = None,
    record: Trials | None = None,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> SearchAnswer:
    """Find the fastest training configurations.

    Configurations are taken in the order of an upper bound of their speed. The search ends when the next bound is not
    above the best speed. A configuration that takes the lead gets the plan that `tune plan` finds.

    Args:
        trials: Most plan searches. With more configurations to try, the answer is not complete.
        best: Number of fastest configurations to find.
        usable: Function that returns False for a configuration that is not to be among them.
        study: URL of a database that keeps the search as an Optuna study, such as ``sqlite:///search.db``. What it
            holds of the same question is not evaluated again. None: the study is kept in memory.
        record: Trials of an earlier search of the same, which goes on. ``study`` is then ignored.
        progress: Called with the number of plan searches, and the largest possible number.

    Raises:
        ValueError: trials < 1, more memory is requested than the machine has, no configuration can be simulated, or
            the database cannot be opened.
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
    record = record or Trials(question, space, study)
    outcomes = {c: outcome for c, outcome in record.held.items() if c in jobs}
    every = [(c, tried) for c, tried in jobs.items() if c not in outcomes]
    turns = [(-_speed(tried, tried.least_s), number, False) for number, (_, tried) in enumerate(every)]
    heapq.heapify(turns)
    searches = 0
    while turns and -turns[0][0] > _to_beat(outcomes, best, usable) * (1 + SLACK):
        bound, number, bounded = heapq.heappop(turns)
        c, tried = every[number]
        if tried.unfit is not None:
            outcomes[c] = record.pruned(c, -bound, question.outcome(c, tried))
        elif not bounded:
            heapq.heappush(turns, (-_speed(tried, tried.bound_s), number, True))
        elif tried.alone is not None:
            outcomes[c] = record.evaluated(c, -bound, partial(question.outcome, c, tried))
        elif searches == trials:
            heapq.heappush(turns, (bound, number, True))
            break
        else:
            searches += 1
            progress(searches, trials)
            least = _to_beat(outcomes, best, usable)
            outcomes[c] = record.evaluated(c, -bound, partial(_planned, question, c, tried, least))
    left = {}
    for bound, number, _ in turns:
        c, tried = every[number]
        if tried.alone is not None and tried.unfit is not None:  # told as not fitting, and not as not tried
            outcomes[c] = record.pruned(c, -bound, question.outcome(c, tried))
        else:
            left[c] = -bound
    record.leave(left, refused)
    complete = not any(bound > _to_beat(outcomes, best, usable) * (1 + SLACK) for bound in left.values())
    combinations = len(jobs) + refused.total()
    answer = SearchAnswer(space, tuple(outcomes.values()), complete, refused, combinations, left=left, trials=record)
    return replace(answer, spread=question.spread(answer.fitting[0])) if answer.fitting else answer


def measure_best(
    question: SearchQuestion,
    answer: SearchAnswer,
    command: Sequence[str],
    most: int,
    limit_s: float = LIMIT_S,
    say: Callable[[str], object] = lambda _: None,
) -> SearchAnswer:
    """Run a training command in the fastest configurations of a search, in turn, and return the answer with what was
    measured.

    A configuration that runs out of memory is followed by the next one that is predicted to take less. For that, the
    search goes on.

    Args:
        most: Number of configurations to measure.
        limit_s: Seconds after which a run of the command is ended.
        told: Called with a sentence before and after each run.
    """
    record, key, made = answer.trials, key_of(command), list[Measurement]()
    assert record is not None

    def usable(outcome: ConfigurationOutcome) -> bool:
        lacking = [one for one in made if one.out_of_memory]
        return not any(outcome == one.outcome or one.rules_out(outcome) for one in lacking)

    while sum(not one.out_of_memory for one in made) < most:
        tried = {as_trained(one.outcome) for one in made}
        following = (o for o in answer.fitting if as_trained(o) not in tried and usable(o))
        outcome = next(following, None)
        if outcome is None and tried and made[-1].out_of_memory:
            known = len(answer.fitting)
            answer = explore(question, answer.space, best=most, usable=usable, record=record)
            if len(answer.fitting) > known:
                continue
        if outcome is None:
            break
        say(f"measuring {outcome.configuration.text()}: predicted {outcome.iteration_s:.3g} s a step")
        one = record.measured(outcome, key, partial(measure, question, outcome, command, limit_s))
        say(f"  {one.sentence}")
        made.append(one)
    return replace(answer, measured=tuple(made))


def _speed(tried: Tried, seconds: float) -> float:
    return (tried.workload.tokens_per_iteration or 0) / seconds


def _to_beat(
    outcomes: dict[Configuration, ConfigurationOutcome], best: int, usable: Callable[[ConfigurationOutcome], bool]
) -> float:
    distinct = dict[Any, float]()
    for outcome in outcomes.values():
        if outcome.fits and usable(outcome):
            key = as_trained(outcome)
            distinct[key] = max(outcome.tokens_per_s, distinct.get(key, 0.0))
    speeds = sorted(distinct.values(), reverse=True)
    return speeds[best - 1] if len(speeds) >= best else 0.0


def as_trained(outcome: ConfigurationOutcome) -> Any:
    """Return what tells a configuration from others in training.

    A plan that may move parameters to host memory, but does not, is the same as one that may not.
    """
    if outcome.plan is None:
        return outcome.configuration
    moves = "host" in outcome.plan.parameter_locations
    kept = outcome.configuration.changed(offload="parameters" if moves else "optimizer", sub_group_size=0)
    return kept, outcome.plan.digest


def _planned(question: SearchQuestion, c: Configuration, tried: Tried, least: float) -> ConfigurationOutcome:
    quick = question.outcome(c, tried)
    if not quick.fits or quick.tokens_per_s <= least:
        return quick
    full = question.outcome(c, tried, FULL, few=False)
    return full if full.fits and full.iteration_s <= quick.iteration_s else replace(quick, quick=False)
