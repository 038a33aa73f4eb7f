"""The search itself, recorded as an optuna study."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ebbtide.tuner.configurations.answer import Answer
from ebbtide.tuner.configurations.decision import Promises, contests, decide
from ebbtide.tuner.configurations.outcome import Outcome, Question
from ebbtide.tuner.configurations.space import Configuration, Space

if TYPE_CHECKING:
    import optuna

TRIALS = 3000


def explore(
    question: Question,
    space: Space,
    *,
    trials: int = TRIALS,
    storage: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Answer:
    """Finds the fastest configuration, and the fastest with each value of each free knob.

    Every combination is considered, and simulated unless its memory or its bound
    (`ebbtide.tuner.configurations.promise`) say that it cannot matter. What was simulated is a trial of an
    optuna study; with ``storage`` it is kept (``optuna-dashboard`` opens it).

    Args:
        trials: simulations at the most; where they do not suffice, the answer is not complete.
        progress: called with (configurations simulated, how many there will be at the most).

    Raises:
        ValueError: trials < 1, a storage that cannot be opened, memory that the machine has not,
            or nothing that can be simulated, with the reason.
    """
    if trials < 1:
        raise ValueError(f"--trials must be >= 1, but got {trials}")
    every = list(space)
    promises = Promises(question)
    refused = Counter(promises.of(c).refused for c in every if promises.of(c).refused)
    if refused.total() == len(every):
        raise ValueError(next(iter(refused)))
    record = _Record(question, space, storage)
    most, done = min(trials, len(every)), 0

    def seen(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        record.add(outcome)
        if progress is not None:
            progress(done, most)

    outcomes, complete = decide(question, contests(space, every, promises), promises, most, seen)
    if progress is not None:
        progress(done, done)
    answer = Answer(space, tuple(outcomes.values()), complete, refused, len(every))
    return replace(answer, spread=question.spread(answer.fitting[0])) if answer.fitting else answer


class _Record:
    """The study: each configuration is a trial once, however often the same is searched."""

    def __init__(self, question: Question, space: Space, storage: str | None) -> None:
        self.space = space
        self.study = _study(question, space, storage)
        self.known = {t.user_attrs.get("configuration") for t in self.study.get_trials(False)}

    def add(self, outcome: Outcome) -> None:
        import optuna

        text = outcome.configuration.text()
        if text in self.known:
            return
        chosen = {knob: getattr(outcome.configuration, knob) for knob in self.space.choices}
        fits = outcome.fits
        states = optuna.trial.TrialState
        self.study.add_trial(
            optuna.trial.create_trial(
                state=states.COMPLETE if fits else states.PRUNED,
                values=[outcome.tokens_per_s, outcome.device_peak_bytes] if fits else None,
                params=chosen,
                distributions={
                    knob: optuna.distributions.CategoricalDistribution(values)
                    for knob, values in self._values().items()
                },
                user_attrs={"configuration": text, "why_not": outcome.why_not},
            )
        )

    def _values(self) -> dict[str, tuple[Any, ...]]:
        """With the default that `Configuration.changed` puts in where a size means nothing."""
        usual = Configuration()
        return {
            knob: tuple(dict.fromkeys((*values, getattr(usual, knob)))) if knob == "sub_group_size" else values
            for knob, values in self.space.choices.items()
        }


def _study(question: Question, space: Space, storage: str | None) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    batch = f", global batch {space.global_batch}" if space.global_batch else ""
    what = f"{question.architecture.name} on {question.machine.name}: {'/'.join(space.free)}{batch}"
    try:
        study = optuna.create_study(
            directions=["maximize", "minimize"],
            storage=storage,
            load_if_exists=True,
            study_name=f"tune search {what} ({_fingerprint(question, space)})",
        )
    except Exception as error:
        if storage is None:
            raise
        raise ValueError(
            "--study-storage must be a storage URL that optuna can open, such as "
            f"sqlite:///study.db, but got {storage!r}: {str(error).splitlines()[0]}"
        ) from None
    with warnings.catch_warnings():  # experimental, and only for what a dashboard shows
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(["tokens per second", "device bytes"])
    study.set_user_attr("base", space.base.text())
    return study


def _fingerprint(question: Question, space: Space) -> str:
    """Of all that the answers depend on: another question is another study."""
    facts = [
        repr(question.architecture),
        question.machine.model_dump_json(),
        json.dumps(question.ds_config, sort_keys=True, default=repr),
        question.sequence,
        question.device_memory_bytes,
        question.host_memory_bytes,
        question.margin,
        question.seed,
        *([dict(question.storage)] if question.storage else []),
        asdict(space.base),
        {knob: list(values) for knob, values in space.choices.items()},
        space.global_batch,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
