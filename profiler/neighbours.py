"""A check whether other programs or limits on the CPU cores have disturbed a measurement on this computer."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

BUSY_SHARE = 0.10  # of all cores, used by other processes
STOLEN_SHARE = 0.02  # of all time, taken by the hypervisor
# Parts of warnings: what was measured beside other programs' work should be measured again.
DISTURBED = ("so the measured rates are too low", "is not stable")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Counters:
    at_s: float
    busy_s: float
    stolen_s: float
    own_s: float
    throttled: int
    hot: int


@dataclass
class HostWatch:
    """A context manager that watches this computer during a measurement, for programs and limits that disturb it.

    The operating system's counters before and after the measurement are compared.

    Args:
        root: Folder that contains ``proc`` and ``sys``. Tests use another folder than ``/``.
        warnings: Sentences about disturbances, filled at the exit of the context.
    """

    root: Path = Path("/")
    warnings: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._judge(self._before, self._read())

    def _judge(self, before: _Counters, after: _Counters) -> None:
        passed_s = (after.at_s - before.at_s) * self._cores()
        if passed_s <= 0:
            return
        others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
        if others_s / passed_s > BUSY_SHARE:
            self.warnings.append(
                f"other processes used {others_s / passed_s:.0%} of the cores during the "
                "measurement, so the measured rates are too low. Stop them and measure again (tune profile --fresh)"
            )
        stolen_s = after.stolen_s - before.stolen_s
        if stolen_s / passed_s > STOLEN_SHARE:
            self.warnings.append(
                f"the hypervisor took {stolen_s / passed_s:.0%} of the cores' time for other virtual machines"
            )
        if after.throttled > before.throttled:
            self.warnings.append(
                "the container's CPU quota (cpu.max) throttled this process during the measurement: "
                "the quota allows less than the cores that the process may run on"
            )
        if after.hot > before.hot:
            self.warnings.append("a core's clock was throttled because it was hot")

    def _read(self) -> _Counters:
        # columns: user nice system idle iowait irq softirq steal. Guest time is included in user
        line = self._text("proc/stat").partition("\n")[0].split()[1:9]
        ticks = [int(field) for field in line] + [0] * (8 - len(line))
        user, nice, system, _, _, irq, softirq, stolen = ticks
        own = os.times()
        return _Counters(
            at_s=time.monotonic(),
            busy_s=(user + nice + system + irq + softirq) / _TICKS_PER_S,
            stolen_s=stolen / _TICKS_PER_S,
            own_s=sum((own.user, own.system, own.children_user, own.children_system)),
            throttled=self._throttled(),
            hot=self._hot(),
        )

    def _cores(self) -> int:
        lines = self._text("proc/stat").splitlines()
        return max(1, sum(line.startswith("cpu") and line[3:4].isdigit() for line in lines))

    def _throttled(self) -> int:
        for line in self._text("sys/fs/cgroup/cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "nr_throttled":
                return int(value)
        return 0

    def _hot(self) -> int:
        folder = self.root / "sys/devices/system/cpu"
        result = folder.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
        return sum(int(path.read_text(encoding="utf-8")) for path in result)

    def _text(self, path: str) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8")
        except OSError:
            return ""
