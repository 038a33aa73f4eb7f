"""The Optuna study of a configuration search, in memory or in a database that `optuna-dashboard` shows.

Importing Optuna takes a fifth of a second, so only searches import this module.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import optuna
from ebbtide.simulator.page import versions
from ebbtide.simulator.plan import Plan
from ebbtide.simulator.rules import RuleError
from ebbtide.tuner.configurations.evaluation import ConfigurationOutcome, SearchQuestion
from ebbtide.tuner.configurations.measuring import Measurement
from ebbtide.tuner.configurations.space import Configuration, Space
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

OBJECTIVES = ("tokens per second", "GPU memory in bytes")
_NUMBERS = ("micro_batch", "accumulation", "gpus")  # on a logarithmic axis, as they are mostly powers of two
_Found = TypeVar("_Found", ConfigurationOutcome, Measurement)
_OF_MEASUREMENT = ("seconds", "device_peak_bytes", "tokens_per_sample", "why_not", "lacks", "device")
_OF_OUTCOME = ("iteration_s", "tokens_per_s", "device_peak_bytes", "host_peak_bytes", "why_not", "missing_bytes")


class Trials:
    """The trials of a configuration search: one for each evaluated configuration, in an Optuna study.

    A trial has the configuration's settings as parameters, and speed and GPU memory as values. Its bound, memory, plan
    and DeepSpeed config are user attributes. What does not fit is pruned, with the reason as the attribute ``why_not``.
    A measured configuration has another trial, with the measured values. It failed if nothing could be measured.

    Attributes:
        study: Study of exactly this question. Another question has another study, by its name.
        held: Outcomes that the study holds, by configuration.
    """

    def __init__(self, question: SearchQuestion, space: Space, storage: str | None = None) -> None:
        self._question, self._sampler = question, _Chosen()
        self._axes = _axes(space)
        self.study = _opened(question, space, storage, self._sampler)
        self.held = dict[Configuration, ConfigurationOutcome]()
        self._measured = dict[str, Mapping[str, Any]]()
        for trial in self.study.get_trials(deepcopy=False) if storage is not None else ():
            attributes = trial.user_attrs
            if "measured" in attributes:
                self._measured[attributes["measured"]] = attributes
            elif trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and "asked" in attributes:
                self.held[Configuration(**json.loads(attributes["asked"]))] = self._outcome(attributes)

    def evaluated(
        self, c: Configuration, bound: float, ask: Callable[[], ConfigurationOutcome]
    ) -> ConfigurationOutcome:
        """Ask the study for a trial of a configuration, evaluate it, and tell the study its outcome.

        Args:
            bound: Tokens per second that no plan can exceed.
        """
        trial, outcome = self._asked_trial(c, ask)
        for name, value in self._attributes(c, bound, outcome).items():
            trial.set_user_attr(name, value)
        if outcome.fits:
            self.study.tell(trial, [outcome.tokens_per_s, outcome.device_peak_bytes])
        else:
            self.study.tell(trial, state=TrialState.PRUNED)
        self.held[c] = outcome
        return outcome

    def pruned(self, c: Configuration, bound: float, outcome: ConfigurationOutcome) -> ConfigurationOutcome:
        """Add a trial for a configuration that was dropped without an evaluation, because its bytes cannot fit."""
        made = optuna.trial.create_trial(
            state=TrialState.PRUNED,
            params=self._params(c),
            distributions=self._axes,
            user_attrs=self._attributes(c, bound, outcome),
        )
        self.study.add_trial(made)
        self.held[c] = outcome
        return outcome

    def measured(
        self, outcome: ConfigurationOutcome, key: Mapping[str, Any], ask: Callable[[], Measurement]
    ) -> Measurement:
        """Return the measurement of a configuration: that of an earlier search, or a new one, as a trial of its own.

        What failed is measured again, unless it ran out of memory.

        Args:
            key: What the measurement depends on beside the configuration.
        """
        c = outcome.configuration
        mark = json.dumps({**key, **asdict(c)}, sort_keys=True)
        if (attributes := self._measured.get(mark)) and (attributes["seconds"] or attributes["lacks"]):
            return Measurement(outcome, **{name: attributes[name] for name in _OF_MEASUREMENT}, held=True)
        trial, made = self._asked_trial(c, ask)
        attributes = {
            "measured": mark,
            "source": "measured",
            "configuration": c.text(),
            "predicted_s": outcome.iteration_s,
            **({"measured_s": made.measured_s, "ratio": made.ratio} if made.seconds else {}),
            **{name: getattr(made, name) for name in _OF_MEASUREMENT},
        }
        for name, value in attributes.items():
            trial.set_user_attr(name, value)
        if made.seconds:
            self.study.tell(trial, [made.tokens_per_s, made.device_peak_bytes or outcome.device_peak_bytes])
        else:
            self.study.tell(trial, state=TrialState.FAIL)
        return made

    def _asked_trial(self, c: Configuration, ask: Callable[[], _Found]) -> tuple[optuna.Trial, _Found]:
        trial = self._asked(c)
        try:
            return trial, ask()
        except BaseException as error:
            trial.set_user_attr("why_not", f"interrupted: {error!r}")
            self.study.tell(trial, state=TrialState.FAIL)
            raise

    def leave(self, left: Mapping[Configuration, float], refused: Mapping[str, int]) -> None:
        """Note in the study what was not tried, with the bound of its speed, and what cannot be simulated."""
        most = max(left, key=left.__getitem__, default=None)
        best = "" if most is None else f", at most {left[most]:,.0f} tokens/s: {most.text()}"
        self.study.set_user_attr("not tried", f"{len(left)} configurations{best}")
        self.study.set_user_attr("cannot be simulated", dict(refused))

    def _asked(self, c: Configuration) -> optuna.Trial:
        self._sampler.chosen = self._params(c)
        return self.study.ask(dict(self._axes))

    def _params(self, c: Configuration) -> dict[str, Any]:
        return {name: getattr(c, name) for name in self._axes}

    def _attributes(self, c: Configuration, bound: float, outcome: ConfigurationOutcome) -> dict[str, Any]:
        plan = outcome.plan
        planned = "DeepSpeed alone" if plan is None else "quick plan" if outcome.quick else "plan"
        return {
            "asked": json.dumps(asdict(c)),
            "configuration": outcome.configuration.text(),
            "found": json.dumps(asdict(outcome.configuration)),
            "source": f"simulated: {planned}" if outcome.fits else "simulated",
            "bound_tokens_per_s": bound,
            **{name: value for name in _OF_OUTCOME if (value := getattr(outcome, name))},
            **({} if plan is None else {"plan": plan.model_dump_json()}),
            **({"deepspeed": json.dumps(outcome.deepspeed)} if outcome.fits else {}),
        }

    def _outcome(self, attributes: Mapping[str, Any]) -> ConfigurationOutcome:
        c = Configuration(**json.loads(attributes["found"]))
        return ConfigurationOutcome(
            **{name: attributes[name] for name in _OF_OUTCOME if name in attributes},
            plan=Plan.model_validate_json(attributes["plan"]) if "plan" in attributes else None,
            configuration=c,
            deepspeed=json.loads(attributes["deepspeed"])
            if "deepspeed" in attributes
            else self._question.of(c).deepspeed(),
            quick="quick" in attributes["source"],
        )


class _Chosen(optuna.samplers.BaseSampler):
    """A sampler that gives each trial the configuration whose turn it is by the bounds of the search."""

    chosen: Mapping[str, Any]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        del study, trial
        return {}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        del study, trial, search_space
        return {}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, name: str, axis: BaseDistribution) -> Any:
        del study, trial, axis
        return self.chosen[name]


def _axes(space: Space) -> dict[str, BaseDistribution]:
    """Return the varied settings as distributions, without the subgroup size, which each plan chooses."""
    values = dict[str, set[Any]]()
    for c in space:
        for name in space.free:
            values.setdefault(name, set()).add(getattr(c, name))
    return {
        name: IntDistribution(min(found), max(found), log=True)
        if name in _NUMBERS
        else CategoricalDistribution(sorted(found))
        for name, found in values.items()
        if len(found) > 1 and name != "sub_group_size"
    }


def _opened(
    question: SearchQuestion, space: Space, storage: str | None, sampler: optuna.samplers.BaseSampler
) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    facts = _facts(question, space)
    mark = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    batch = f", {space.global_batch} samples a step" if space.global_batch else ""
    arch = question.job.architecture
    try:
        study = optuna.create_study(
            directions=["maximize", "minimize"],
            storage=storage,
            sampler=sampler,
            load_if_exists=True,
            study_name=f"{arch.name} of {arch.elements / 1e9:.3g} B on {question.machine.name}{batch} ({mark})",
        )
    except Exception as error:
        if storage is None:
            raise
        raise RuleError(
            "--study must be the URL of a database that Optuna can open, such as sqlite:///search.db, but got "
            f"{storage!r}: {str(error).splitlines()[0]}",
            key="study",
        ) from None
    if storage is None or "question" not in study.user_attrs:
        study.set_user_attr("question", facts)
        with warnings.catch_warnings():  # experimental, and only a dashboard shows them
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(OBJECTIVES))
    return study


def _facts(question: SearchQuestion, space: Space) -> dict[str, Any]:
    """Return everything that the outcomes depend on."""
    return {
        **versions("ebbtide"),
        "model": repr(question.job.architecture),
        "machine": json.loads(question.machine.model_dump_json()),
        "ds_config": json.loads(json.dumps(question.ds_config, default=repr)),
        "sequence": question.sequence,
        "memory": [question.device_memory_bytes, question.host_memory_bytes, question.margin],
        "shape": {name: repr(value) for name, value in question.shape.items()},
        "storage": dict(question.storage),
        "base": asdict(space.base),
        "values": {name: list(values) for name, values in space.choices.items()},
        "free": list(space.free),
        "samples of a step": space.global_batch,
    }
