"""The launch of a training command by ``tune verify``, in a separate process that records its training."""

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ebbtide.tuner.verify.run import RecordedRun, read_run
from ebbtide.tuner.watched import ended, tail

# Two forms of torch's message about an operation: the usual one, and the one for the backward of attention.
_NAMED = re.compile(
    r"(\S+) does not have a deterministic implementation|(\w[\w ]*) defaults to a non-deterministic algorithm"
)


class VerifyError(RuntimeError):
    """An error: a training command that ``tune verify`` started did not train to the end.

    The message names the run and ends with the last output of the command.
    """


class NotDeterministicError(VerifyError):
    """An error: ``tune verify`` requires a deterministic run, but torch has no deterministic kernel for
    some operations of the training.

    Attributes:
        operations: Names of these operations as torch gives them.
    """

    def __init__(self, operations: tuple[str, ...]) -> None:
        super().__init__(
            f"{', '.join(operations)} has no deterministic kernel in torch. Use --no-deterministic to run with "
            "the script's own kernels."
        )
        self.operations = operations


@dataclass(frozen=True)
class Side:
    """A kind of run in ``tune verify``, given by the changes to the training command, such as training without offload.

    The fields are those of `ebbtide.runtime.verify.lines.RecordingSettings`.
    """

    name: str
    deterministic: bool = False

    @property
    def title(self) -> str:
        if self.deterministic:
            return f"{self.name}, with torch's deterministic algorithms"
        return self.name

    @property
    def how(self) -> str:
        """Return a phrase that says how ``tune verify`` ran the training command, for error messages."""
        return "as it is" if self == Side("plan") else f"as {self.title}"


def launch(
    command: Sequence[str], side: Side, steps: int, seed: int = 0, *, deterministic: bool = False
) -> RecordedRun:
    """Run a training command for some steps in a separate process, and return the recorded training run.

    Args:
        side: Changes to the command, such as training without offload.
        seed: Seed of the random generators that the script does not seed itself.
        deterministic: True to use torch's deterministic kernels, and to let the run fail at an operation without one.
            If ``side.deterministic`` is True, this argument is ignored: deterministic kernels are used, and an
            operation without one only causes a warning.

    Raises:
        NotDeterministicError: The run failed because of ``deterministic``, at an operation without a deterministic
            kernel.
        VerifyError: No rank took a step, or the command failed before its last step.
    """
    with tempfile.TemporaryDirectory(prefix="ebbtide-verify-") as scratch:
        job = {
            "folder": scratch,
            "side": side.name,
            "steps": steps,
            "seed": seed,
            "deterministic": side.deterministic,
            "strict": deterministic and not side.deterministic,
        }
        # cuBLAS reads this variable when its library is loaded. Without it, torch raises an error at the first product.
        products = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if job["strict"] else {}
        environment = {**products, **os.environ, "PYTHONHASHSEED": str(seed)}
        code, text = ended(command, Path(scratch), {"EBBTIDE_VERIFY": json.dumps(job)}, environment)
        run = read_run(Path(scratch), side.title)
    if run is not None:
        _clean_up(run)
    operations = operations_in(text)
    if code and job["strict"] and operations:
        raise NotDeterministicError(operations)
    if run is None or len(run.steps) < 2:
        raise VerifyError(_failure(side, code, text))
    if run.silent or (code and len(run.steps) - 1 < steps):
        raise VerifyError(_broken_off(side, code, run, steps, text))
    return replace(run, asked=steps, operations=operations)


def operations_in(text: str) -> tuple[str, ...]:
    """Return the operations that torch's warnings in a command's output call nondeterministic."""
    return tuple(dict.fromkeys(op or attention for op, attention in _NAMED.findall(text)))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _clean_up(run: RecordedRun) -> None:
    from ebbtide.runtime.hardware.launcher import remove_shared_buffers

    with suppress(TypeError, ValueError):  # the script of a single rank has no port
        remove_shared_buffers(int(run.about["port"]))


def _broken_off(side: Side, code: int | None, run: RecordedRun, steps: int, text: str) -> str:
    silent = f", and {run.silent} of its ranks took none" if run.silent else ""
    return (
        f"the command must train for --steps {steps} or end by itself, but {side.how} it "
        f"failed with exit code {code} after {len(run.steps) - 1}{silent}:\n{tail(text)}"
    )


def _failure(side: Side, code: int | None, text: str) -> str:
    return (
        f"the command must train with a DeepSpeed engine or a torch optimizer, but "
        f"{side.how} it ended with exit code {code} before an optimizer step (--against leaves "
        f"sides out):\n{tail(text)}"
    )
