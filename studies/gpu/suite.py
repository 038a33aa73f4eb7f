"""Code that all sections of the GPU suite share: settings, files, and processes with a time limit."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.runtime.hardware import builds
from ebbtide.simulator import Machine, Plan, Workload
from ebbtide.simulator.workload import ASSUMED_CLIP_RATE

from studies.bench.rank import remove_left_buffers

Figures = dict[str, Any]
TRIAL_LIMIT_S = 240.0
LEAST_S = 5.0  # with less time left, no trial is started
SHOWN_CHARACTERS = 300  # of an error message. The whole message is in the folder logs/


class OutOfTimeError(RuntimeError):
    """An error of the GPU suite: the time allowed by ``--minutes`` is used up."""


@dataclass(frozen=True)
class Suite:
    """The settings of one run of the GPU suite, and the functions that its measurements share.

    Attributes:
        emulated: True to run tiny sizes on a machine without a GPU.
        deadline_s: Time on the monotonic clock by which every process must have ended, in seconds.
        again: True to repeat measurements that an earlier run has already made.
        at_once: Number of concurrent training runs. More than one makes their times useless.
        host_gib: Host memory in GiB. If None, the number that the system reports is used. This may be
            too small on a virtual machine whose memory grows with its use.
    """

    out: Path
    size: str
    cap_gib: float
    subgroup: int
    emulated: bool
    deadline_s: float = math.inf
    again: bool = False
    at_once: int = 1
    host_gib: float | None = None

    @property
    def steps(self) -> int:
        """Return the number of timed steps of a training run in the GPU suite."""
        return 2 if self.emulated else 8

    def left_s(self, most_s: float = TRIAL_LIMIT_S) -> float:
        """Return the seconds that a process of the GPU suite may take if it is started now, at most ``most_s``.

        Raises:
            OutOfTimeError: If almost no time is left until the suite's deadline.
        """
        left_s = min(most_s, self.deadline_s - time.monotonic())
        if left_s < LEAST_S:
            raise OutOfTimeError("out of time (--minutes)")
        return left_s

    # -- trials ------------------------------------------------------------------------------

    def trial(self, name: str, *arguments: str) -> Figures:
        """Run one training of `studies.trials.offload_trial` in its own process, and return its results as a dict.

        If the training fails, the dict has the reason under the key ``failed``. The result of an earlier successful run
        with the same arguments is reused, unless the suite was told to repeat all runs.
        """
        path = self._of_this_size("trials", f"{name}.json")
        command = ["studies.trials.offload_trial", "--json", str(path), *self._sizes(), *arguments]
        row = self._measured(path, command)
        return {**row, "name": name} if "failed" not in row else {"variant": name, **row}

    def trials(self, arguments: Mapping[str, Sequence[str]]) -> dict[str, Figures]:
        """Run several trainings, and return their results by the trainings' names, in the same order."""
        if self.at_once == 1:  # in this process, where an interrupt ends the running trial
            return {name: self.trial(name, *own) for name, own in arguments.items()}
        with ThreadPoolExecutor(self.at_once) as pool:
            rows = pool.map(lambda name: self.trial(name, *arguments[name]), arguments)
            return dict(zip(arguments, rows, strict=True))

    def plans(self, name: str, plans: dict[str, Plan]) -> list[Figures]:
        """Measure several plans in turn on one engine, in a process of `studies.trials.plan_trials`.

        Return a list with a row of results per plan.
        """
        folder = self._of_this_size("trials", name)
        folder.mkdir(parents=True, exist_ok=True)
        for number, (of, plan) in enumerate(plans.items()):
            plan.save(folder / f"{number}_{of}.plan.json")
        files = [str(path) for path in sorted(folder.glob("*.plan.json"))]
        path = self._of_this_size("trials", f"{name}.json")
        command = ["studies.trials.plan_trials", "--json", str(path), *self._sizes(), "--plans", *files]
        result = self._measured(path, command)
        rows: list[Figures] = result.get("rows", [])
        done = {row["name"] for row in rows}
        missing = str(result.get("failed", "the process ended before"))
        return rows + [{"name": of, "variant": "ebbtide", "failed": missing} for of in plans if of not in done]

    def _sizes(self) -> list[str]:
        device = ["--device", "emulated"] if self.emulated else ["--device", "cuda"]
        return [
            "--size",
            self.size,
            "--cap-gib",
            str(self.cap_gib),
            "--subgroup",
            str(self.subgroup),
            "--steps",
            str(self.steps),
            "--clip-rate",
            str(ASSUMED_CLIP_RATE),
            *device,
        ]

    def _of_this_size(self, *parts: str) -> Path:
        return self.out.joinpath(self.size, *parts)

    def _measured(self, path: Path, command: list[str]) -> Figures:
        requested = path.with_suffix(".command")
        if not self.again and path.exists() and requested.exists():
            known: Figures = json.loads(path.read_text())
            if json.loads(requested.read_text()) == command and "failed" not in known:
                return known
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        requested.write_text(json.dumps(command))
        try:
            failed = self.run(f"{self.size}-{path.stem}", command, self.left_s())
        except OutOfTimeError as error:
            failed = str(error)
        figures: Figures = json.loads(path.read_text()) if path.exists() else {}
        return figures if failed is None else {**figures, "failed": failed}

    def run(self, name: str, command: list[str], limit_s: float, under: Sequence[str] = ()) -> str | None:
        """Run ``python -m`` with the given command in a new process, and write its output to a file in logs/.

        Lock files that killed compilations of DeepSpeed's ops have left are removed before, because the process would
        wait for them forever.

        Args:
            limit_s: Seconds after which the process is killed.
            under: Program with its options that starts Python, such as a memory checker.

        Returns:
            One line about the failure. None if the command succeeded.
        """
        logs = self.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for lock in filter(builds.is_stale, builds.locks(builds.extensions_folder())):
            lock.unlink(missing_ok=True)
        errors = logs / f"{name}.stderr"
        with errors.open("w") as stderr, (logs / f"{name}.stdout").open("w") as stdout:
            process = subprocess.Popen(
                [*under, sys.executable, "-W", "ignore", "-m", *command],
                stdout=stdout,
                stderr=stderr,
                env=self._environment(),
                start_new_session=True,
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"took longer than {limit_s:.0f} s"
            except BaseException:
                _end(process)
                raise
        if status == 0:
            return None
        lines = errors.read_text(errors="replace").strip().splitlines() or ["no message"]
        return f"{lines[-1][-SHOWN_CHARACTERS:]} (exit status {status}; logs/{name}.stderr)"

    def _environment(self) -> dict[str, str]:
        # A training process gets one thread per core near the GPU, as DeepSpeed's documentation advises.
        environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "RANK")}
        if not self.emulated:
            from ebbtide.runtime.hardware.cores import near_cores
            from ebbtide.runtime.hardware.pci import pci_address

            environment["OMP_NUM_THREADS"] = str(len(near_cores(pci_address(0))))
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required for deterministic matrix products
        return environment

    # -- what several sections need ----------------------------------------------------------

    def machine(self) -> Machine:
        path = self.out / "machine_profile.json"
        if not path.exists():
            self.measure_machine().save(path)
        return Machine.load(path)

    def measure_machine(self) -> Machine:
        """Measure the rates of the machine that the GPU suite runs on, such as bandwidths and the speed of updates.

        With a GPU this takes a minute.
        """
        from ebbtide.profiler import measure_machine

        small: Figures = {"seconds": 1.0, "elements": 100_000} if self.emulated else {"seconds": 45.0}
        machine = measure_machine(self.out / "storage", fresh=True, **small)
        if self.host_gib is None:
            return machine
        return machine.model_copy(update={"host_memory_bytes": int(self.host_gib * 2**30)})

    def workload(self) -> Workload:
        path = self._of_this_size("workload.json")
        if not path.exists():
            row = self.trial("profile", "--workload", str(path))
            if "failed" in row:
                raise RuntimeError(f"the workload could not be profiled: {row['failed']}")
        return Workload.load(path)

    def plan(self) -> Plan:
        """Return the tuner's plan for the GPU suite's model within its GPU memory limit."""
        if not self.plan_path.exists():
            self._plan_for(self.workload()).save(self.plan_path)
        return Plan.load(self.plan_path)

    def _plan_for(self, workload: Workload) -> Plan:
        import ebbtide.tuner

        limit = None if self.emulated else int(self.cap_gib * 2**30)
        # The subgroup size is fixed, because all training runs of the suite hash their state per subgroup.
        return ebbtide.tuner.plan(workload, self.machine(), device_memory_bytes=limit, subgroup_sizes=())

    def plan_all_on(self, micro_batches: int) -> Plan:
        """Return the tuner's plan for steps of several micro-batches that never clip."""
        # Such steps allow every feature of a plan. On a machine without a GPU, the plan is then changed to use every
        # feature, even if a feature makes it slower.
        accumulating = {"gradient_accumulation_steps": micro_batches, "clip_rate": 0.0}
        plan = self._plan_for(self.workload().model_copy(update=accumulating))
        return plan.with_bits(early=True, sum_on_device=True) if self.emulated else plan

    def save_plan(self, name: str, plan: Plan) -> Path:
        """Save the plan of the training run ``name``, and return the file's path."""
        path = self._of_this_size(f"{name}.plan.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        return path

    @property
    def plan_path(self) -> Path:
        return self._of_this_size("plan.json")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    remove_left_buffers()
