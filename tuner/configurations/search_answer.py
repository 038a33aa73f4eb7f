"""The result of a search for the fastest training configuration, and its explanation in words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome
from ebbtide.tuner.configurations.measuring import Measurement
from ebbtide.tuner.configurations.space import Configuration, Space

if TYPE_CHECKING:
    from ebbtide.tuner.configurations.study import Trials

NEAR = 0.05  # a slower configuration within this share of the best is named for the GPUs that it saves
SAME = 0.01  # simulated times that differ by less than this share count as equal


@dataclass(frozen=True)
class SearchAnswer:
    """The result of a search for the fastest training configuration.

    Attributes:
        space: Set of configurations that was searched.
        outcomes: Predictions of all simulated configurations, in the order of the search.
        complete: True if no other configuration can be faster: each of them cannot fit, cannot be simulated, or has a
            bound that is not above the fastest.
        left: Upper bounds of the tokens per second of the configurations that were not simulated.
        refused: Number of configurations that cannot be simulated, by reason.
        combinations: Number of configurations in the set.
        spread: Relative uncertainty of the fastest configuration's predicted time.
        trials: The search as trials of an Optuna study.
        measured: Measurements of the fastest configurations on this machine, if any were asked for.
    """

    space: Space
    outcomes: tuple[ConfigurationOutcome, ...]
    complete: bool
    refused: Mapping[str, int] = field(default_factory=dict)
    combinations: int = 0
    spread: float = SAME
    left: Mapping[Configuration, float] = field(default_factory=dict)
    trials: "Trials | None" = field(default=None, repr=False, compare=False)
    measured: tuple[Measurement, ...] = ()

    @property
    def fastest_measured(self) -> list[Measurement]:
        """Return what was measured, the fastest first, without what failed."""
        return sorted((one for one in self.measured if one.seconds), key=lambda one: -one.tokens_per_s)

    @property
    def best(self) -> ConfigurationOutcome | None:
        """Return the configuration that is measured to be the fastest, or predicted to be if nothing was measured."""
        known = [one.outcome for one in self.fastest_measured] or self.fitting
        return known[0] if known else None

    @property
    def fitting(self) -> list[ConfigurationOutcome]:
        """Return the outcomes that fit, the fastest first. Of equally fast ones, the least GPU memory is first."""
        fit = [o for o in self.outcomes if o.fits]
        return sorted(fit, key=lambda o: (-o.tokens_per_s, o.device_peak_bytes))

    @property
    def front(self) -> list[ConfigurationOutcome]:
        """Return the outcomes on the Pareto front of speed and GPU memory, the fastest first."""
        front: list[ConfigurationOutcome] = []
        for outcome in self.fitting:
            if not front or outcome.device_peak_bytes < front[-1].device_peak_bytes:
                front.append(outcome)
        return front

    def costs(self) -> dict[str, dict[Any, float]]:
        """Return how fast training can be with each value of each varied setting, as a dict from setting to a dict from
        value to relative speed.

        The relative speed of a value is the tokens per second of the fastest configuration that has this value and fits
        into memory, divided by the tokens per second of the fastest configuration of all.
        """
        fitting = self.fitting
        costs: dict[str, dict[Any, float]] = {}
        for knob in self.space.free:
            best: dict[Any, float] = {}
            for outcome in fitting:
                best.setdefault(getattr(outcome.configuration, knob), outcome.tokens_per_s / fitting[0].tokens_per_s)
            costs[knob] = best
        return costs

    def untried(self) -> dict[str, dict[Any, float]]:
        """Return, for each value without a simulated result, the most that its configurations can reach, relative to
        the fastest. Values of configurations that do not fit are left out.
        """
        if not self.fitting:
            return {}
        best, costs = self.fitting[0].tokens_per_s, self.costs()
        most: dict[str, dict[Any, float]] = {knob: {} for knob in self.space.free}
        for c, bound in self.left.items():
            for knob in set(self.space.free) - {"sub_group_size"}:  # each plan chooses its own size
                value = getattr(c, knob)
                if value not in costs[knob]:
                    most[knob][value] = max(most[knob].get(value, 0.0), bound / best)
        return most

    def remarks(self) -> list[str]:
        """Return the result of a configuration search as a list of sentences.

        The sentences name the fastest configuration, the gain of offloading, and a smaller number of GPUs if
        that is enough.
        """
        if not self.fitting:
            return [self._nothing_fits()]
        best = self.fitting[0]
        by = "fastest by prediction" if self.measured else "fastest"
        remarks = [*self._measured(), f"{by}: {best.configuration.text()}: {best.tokens_per_s:,.0f} tokens/s"]
        remarks += self._offloading(best) + self._fewer_gpus(best)
        remarks += [f"{count} configurations were left out: {why}" for why, count in self.refused.items()]
        if not self.complete:
            remarks.append(
                f"{sum(bound > best.tokens_per_s for bound in self.left.values())} of {self.combinations} "
                "configurations were not tried (--trials), although their bounds are above the fastest"
            )
        return remarks

    def _measured(self) -> list[str]:
        if not self.measured or not self.fastest_measured:
            return ["nothing was measured: every configuration failed"] if self.measured else []
        first, *others = self.fastest_measured
        lines = [
            f"fastest measured: {first.outcome.configuration.text()}: {first.tokens_per_s:,.0f} tokens/s, "
            f"{first.ratio:.2f} times the predicted time"
        ]
        alike = [one for one in others if one.quickest_speed >= first.slowest_speed]
        if alike:
            lines.append(
                f"the variation of its steps is larger than its lead over {alike[0].outcome.configuration.text()}"
            )
        o = first.outcome
        assumed = o.tokens_per_s * o.iteration_s / o.configuration.global_batch
        real = first.tokens_per_sample
        if real is not None and abs(real - assumed) > NEAR * assumed:
            lines.append(
                f"the script's samples have {real:.0f} tokens, but the search assumed {assumed:.0f} (--sequence), so "
                "predictions are of other work, and the tokens/s count samples of the assumed length"
            )
        return lines

    def _offloading(self, best: ConfigurationOutcome) -> list[str]:
        if "offload" not in self.space.free:
            return []
        stays = best.configuration.offload == "none"
        word, other_word = _WORDS[not stays], _WORDS[stays]
        others = [o for o in self.outcomes if (o.configuration.offload == "none") != stays]
        fitting = sorted((o for o in others if o.fits), key=lambda o: -o.tokens_per_s)
        if fitting:
            share = fitting[0].tokens_per_s / best.tokens_per_s
            if share >= 1 - max(SAME, self.spread):
                return [
                    f"offloading makes no difference within the error of predictions ({self.spread:.0%}): "
                    f"{other_word} reaches {share:.1%} of the fastest: {fitting[0].configuration.text()}"
                ]
            return [f"{word} is best: {1 / share:.2f}x as fast as {other_word}"]
        lacking = [o for o in others if not o.refused]
        bounds = [bound for c, bound in self.left.items() if (c.offload == "none") != stays]
        if bounds and self.complete:
            return [f"{word} is best: {other_word} reaches at most {max(bounds) / best.tokens_per_s:.0%} (not tried)"]
        if not lacking or bounds:
            return []
        least = min(lacking, key=lambda o: o.missing_bytes)
        return [f"{word} is best: {other_word} does not fit. The closest configuration {least.why_not}"]

    def _fewer_gpus(self, best: ConfigurationOutcome) -> list[str]:
        enough = [
            o
            for o in self.fitting
            if o.configuration.gpus < best.configuration.gpus and o.tokens_per_s >= (1 - NEAR) * best.tokens_per_s
        ]
        if not enough:
            return []
        least = min(enough, key=lambda o: o.configuration.gpus)
        share = least.tokens_per_s / best.tokens_per_s
        return [f"fewer GPUs are enough: {least.configuration.text()} reaches {share:.0%} of the fastest"]

    def _nothing_fits(self) -> str:
        lacking = [o for o in self.outcomes if not o.refused]
        advice = "Search more settings (--free), or allow more memory (--gpu-memory, --host-memory)"
        if not lacking:
            return f"nothing fits. {advice}"
        least = min(lacking, key=lambda o: o.missing_bytes)
        simulated = "" if self.complete else " of those simulated"
        closest = f"The closest configuration{simulated}, {least.configuration.text()}, {least.why_not}"
        return f"nothing fits. {closest}. {advice}"


_WORDS = {True: "offloading", False: "not offloading"}
