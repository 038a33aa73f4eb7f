"""What all parts of the GPU suite share: the folder, the sizes, and trials with a time limit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator import Machine, Plan, Workload

Figures = dict[str, Any]
TRIAL_LIMIT_S = 240.0
LEAST_S = 5.0  # nothing is worth starting with less


class OutOfTimeError(RuntimeError):
    """The time that the suite was given (--minutes) is used up."""


@dataclass(frozen=True)
class Suite:
    """What all parts share.

    Attributes:
        emulated: a machine without a GPU runs tiny sizes.
        deadline_s: on the monotonic clock; no process runs beyond it.
    """

    out: Path
    size: str
    cap_gib: float
    subgroup: int
    emulated: bool
    deadline_s: float = math.inf

    def left_s(self, most_s: float = TRIAL_LIMIT_S) -> float:
        """Seconds that something that starts now may take.

        Raises:
            OutOfTimeError: next to none.
        """
        left_s = min(most_s, self.deadline_s - time.monotonic())
        if left_s < LEAST_S:
            raise OutOfTimeError("out of time (--minutes)")
        return left_s

    def trial(self, name: str, *arguments: str) -> Figures:
        """One `studies.bench.offload_trial` as a process; a failure is a row that says how."""
        path = self.out / "trials" / f"{name}.json"
        command = [
            sys.executable, "-m", "studies.bench.offload_trial", "--json", str(path),
            "--size", self.size, "--cap-gib", str(self.cap_gib), "--subgroup", str(self.subgroup),
            "--steps", "3" if self.emulated else "8", *arguments,
        ]  # fmt: skip
        try:
            limit_s = self.left_s()
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except OutOfTimeError as error:
            return {"variant": name, "failed": str(error)}
        except subprocess.TimeoutExpired:
            return {"variant": name, "failed": f"took longer than {limit_s:.0f} s"}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"variant": name, "failed": last[-300:]}
        return {**json.loads(path.read_text()), "name": name}

    def machine(self) -> Machine:
        path = self.out / "machine_profile.json"
        if not path.exists():
            self.measure_machine().save(path)
        return Machine.load(path)

    def measure_machine(self) -> Machine:
        """Takes a minute on a GPU machine."""
        from profiler import measure_machine

        small: Figures = {"seconds": 1.0, "elements": 100_000} if self.emulated else {
            "seconds": 45.0}  # fmt: skip
        return measure_machine(self.out / "storage", fresh=True, **small)

    def workload(self) -> Workload:
        path = self.out / "workload.json"
        if not path.exists():
            row = self.trial("profile", "--workload", str(path))
            if "failed" in row:
                raise RuntimeError(f"the workload could not be profiled: {row['failed']}")
        return Workload.load(path)

    def plan(self) -> Plan:
        """The tuner's, within the cap."""
        import tuner

        path = self.out / "plan.json"
        if not path.exists():
            limit = None if self.emulated else int(self.cap_gib * 2**30)
            tuner.plan(self.workload(), self.machine(), device_memory_bytes=limit).save(path)
        return Plan.load(path)
