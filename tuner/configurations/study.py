"""The search itself: every combination where there are few, optuna's sampler where many."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.configurations.outcome import Outcome, Question
from tuner.configurations.space import Configuration, Space

if TYPE_CHECKING:
    import optuna

NEAR = 0.05  # of the best: close enough to be named for what it saves


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        outcomes: every configuration that was simulated, in the order of the search.
        complete: all of the space was; else a sample of it.
    """

    space: Space
    outcomes: tuple[Outcome, ...]
    complete: bool

    @property
    def fitting(self) -> list[Outcome]:
        """Fastest first; of equally fast ones the one with more memory to spare."""
        fit = [o for o in self.outcomes if o.fits]
        return sorted(fit, key=lambda o: (-o.tokens_per_s, o.device_peak_bytes))

    @property
    def front(self) -> list[Outcome]:
        """Pareto: nobody else is as fast with less device memory; fastest first."""
        front: list[Outcome] = []
        for outcome in self.fitting:
            if not front or outcome.device_peak_bytes < front[-1].device_peak_bytes:
                front.append(outcome)
        return front

    def costs(self) -> dict[str, dict[Any, float]]:
        """Per free knob and value: the best speed with it, as a share of the best of all."""
        fitting = self.fitting
        costs: dict[str, dict[Any, float]] = {}
        for knob in self.space.free:
            best: dict[Any, float] = {}
            for outcome in fitting:
                best.setdefault(
                    getattr(outcome.configuration, knob),
                    outcome.tokens_per_s / fitting[0].tokens_per_s,
                )
            costs[knob] = best
        return costs

    def remarks(self) -> list[str]:
        """In plain words: the best, whether offloading pays, whether fewer GPUs would do."""
        if not self.fitting:
            return [_nothing_fits(self.outcomes)]
        best = self.fitting[0]
        remarks = [f"fastest: {best.configuration.text()}: {best.tokens_per_s:,.0f} tokens/s"]
        remarks += self._offloading(best) + self._fewer_gpus(best)
        if not self.complete:
            remarks.append(f"{len(self.outcomes)} configurations were sampled, not all (--trials)")
        return remarks

    def _offloading(self, best: Outcome) -> list[str]:
        if "offload" not in self.space.free:
            return []
        stays = best.configuration.offload == "none"
        word = "not offloading" if stays else "offloading"
        others = [o for o in self.outcomes if (o.configuration.offload == "none") != stays]
        fitting = [o for o in others if o.fits]
        fitting.sort(key=lambda o: -o.tokens_per_s)
        if fitting:
            gain = best.tokens_per_s / fitting[0].tokens_per_s
            return [f"{word} is best: {gain:.2f}x the best configuration that does otherwise"]
        if not others:
            return []
        least = min(others, key=lambda o: o.device_peak_bytes or float("inf"))
        return [f"{word} is best: otherwise nothing fits ({least.why_not}, at the least)"]

    def _fewer_gpus(self, best: Outcome) -> list[str]:
        enough = [
            o for o in self.fitting
            if o.configuration.gpus < best.configuration.gpus
            and o.tokens_per_s >= (1 - NEAR) * best.tokens_per_s
        ]  # fmt: skip
        if not enough:
            return []
        least = min(enough, key=lambda o: o.configuration.gpus)
        share = least.tokens_per_s / best.tokens_per_s
        return [f"fewer GPUs do: {least.configuration.text()} reaches {share:.0%} of it"]


def _nothing_fits(outcomes: tuple[Outcome, ...]) -> str:
    whys = [o.why_not for o in outcomes]
    return (
        f"nothing fits: {len(outcomes)} configurations were simulated; of the first: {whys[0]} "
        "(--free more knobs, --gpu-memory, --host-memory)"
    )


def explore(
    question: Question,
    space: Space,
    *,
    trials: int = 300,
    storage: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Answer:
    """Searches the space for tokens per second against device memory.

    Every combination is simulated where there are at most ``trials``; else optuna's NSGA-II
    samples, from the base. With ``storage`` the study is kept (``optuna-dashboard`` opens it).

    Args:
        progress: called with (configurations simulated, how many there will be).

    Raises:
        ValueError: trials < 1.
    """
    if trials < 1:
        raise ValueError(f"--trials must be >= 1, but got {trials}")
    every = list(space)
    complete = len(every) <= trials
    study = _study(question, storage, complete, space, seed)
    outcomes: dict[Configuration, Outcome] = {}
    for configuration in every if complete else every[:1]:
        study.enqueue_trial({knob: getattr(configuration, knob) for knob in space.choices})

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        chosen = {k: trial.suggest_categorical(k, v) for k, v in space.choices.items()}
        configuration = space.made(chosen)
        if configuration is None:
            raise _pruned(trial, f"the global batch cannot be {space.global_batch}")
        trial.set_user_attr("configuration", configuration.text())
        if configuration not in outcomes:
            outcomes[configuration] = question.answer(configuration)
            if progress is not None:
                progress(len(outcomes), min(len(every), trials))
        outcome = outcomes[configuration]
        if not outcome.fits:
            raise _pruned(trial, outcome.why_not)
        return outcome.tokens_per_s, outcome.device_peak_bytes

    study.optimize(objective, n_trials=len(every) if complete else trials)
    return Answer(space, tuple(outcomes.values()), complete)


def _pruned(trial: optuna.Trial, why: str) -> Exception:
    import optuna

    trial.set_user_attr("why_not", why)
    return optuna.TrialPruned(why)


def _study(
    question: Question, storage: str | None, complete: bool, space: Space, seed: int
) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = optuna.samplers
    sampler = samplers.RandomSampler(seed) if complete else samplers.NSGAIISampler(seed=seed)
    batch = f", global batch {space.global_batch}" if space.global_batch else ""
    study = optuna.create_study(
        directions=["maximize", "minimize"], sampler=sampler, storage=storage, load_if_exists=True,
        study_name=f"tune search on {question.machine.name}: {'/'.join(space.free)}{batch}",
    )  # fmt: skip
    with warnings.catch_warnings():  # experimental, and only for what a dashboard shows
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(["tokens per second", "device bytes"])
    study.set_user_attr("base", space.base.text())
    return study
