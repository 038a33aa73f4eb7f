"""Tests of ``plan="auto"`` on several ranks of a node: one rank measures the machine, and the others wait
for the result.
"""

from pathlib import Path

from tests.prepared import Started

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path

import torch.distributed as dist

import ebbtide.profiler
from ebbtide.runtime.replan import measuring
from ebbtide.runtime.replan.measuring import measured_machine
from tests.machines import machine

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

def measure(progress):
    (folder / f"measured_by_{rank}").touch()
    return machine(name=f"as rank {rank} sees it")

def fail(progress):
    raise OSError("planted")

ebbtide.profiler.measure_machine = measure
measuring.DRIVE_BYTES, measuring.DRIVE_S = 2**20, 0.05
found = measured_machine([str(folder / "drive")])
print(found.name, *(Path(name).name for name in found.drives))
ebbtide.profiler.measure_machine = fail
try:
    measured_machine()
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_one_rank_of_a_node_measures(tmp_path, child_environment):
    ranks = [Started(["-c", RANK, rank, tmp_path], env=child_environment, cwd=ROOT) for rank in (0, 1)]
    told = [rank.wait(400) for rank in ranks]
    said = [rank.stdout.strip().splitlines()[-2:] for rank in told]
    failed = (
        "an automatic plan measures the machine before training, but the measurement failed (rank 0: OSError: "
        'planted). Fix the cause, or give a plan file instead of "automatic"'
    )
    assert said == [["as rank 0 sees it drive", failed]] * 2, told
    assert [path.name for path in tmp_path.glob("measured_by_*")] == ["measured_by_0"]
