"""Tests of several ranks that search for a new plan during training. They must agree on one workload and one plan."""

from pathlib import Path
from types import SimpleNamespace

from ebbtide.runtime.replan.auto import _agreed, _medians
from ebbtide.simulator.update.pausing import PauseRule

from tests.machines import workload
from tests.prepared import Started

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from types import SimpleNamespace

import torch.distributed as dist

from ebbtide.runtime.replan.auto import _agreed
from ebbtide.runtime.replan.measuring import by_the_first
from ebbtide.simulator.update.pausing import PauseRule
from tests.machines import workload

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/meeting", rank=rank, world_size=2)
session = SimpleNamespace(pausing=PauseRule())
agreed = _agreed(workload(forward_s=1.0 + 2 * rank, backward_s=4.0, step_issue_s=2.0 + 4 * rank), session)
print(agreed.ranks_per_node, agreed.nodes, round(agreed.forward_s, 9), round(agreed.backward_s, 9), agreed.step_issue_s)
print(by_the_first(lambda: f"plan of rank {rank}"))

def fail():
    raise OSError("planted")

try:
    by_the_first(fail)
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_all_ranks_come_to_the_same_plan(tmp_path, child_environment):
    ranks = [Started(["-c", RANK, rank, tmp_path], env=child_environment, cwd=ROOT) for rank in (0, 1)]
    told = [rank.wait(400) for rank in ranks]
    said = [rank.stdout.strip().splitlines()[-3:] for rank in told]
    failed = "rank 0: OSError: planted"
    assert said == [["2 1 8.0 16.0 4.0", "plan of rank 0", failed]] * 2, told


def test_the_counted_clip_rate_is_planned_with():
    counted = PauseRule(steps=64, clipped=40)
    agreed = _agreed(workload(clip=True), SimpleNamespace(pausing=counted))
    assert agreed.clip_rate == (40 + 1.6) / 80
    assert _agreed(workload(clip=False), SimpleNamespace(pausing=counted)).clip_rate == 0.0
    assert PauseRule().clip_rate == 0.1


def test_rates_are_the_median_of_the_ranks_that_know_them():
    assert _medians([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {"a": 9.0}]) == {"a": 3.0, "b": 2.0}
