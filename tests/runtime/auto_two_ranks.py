"""Training with ``plan="auto"`` on two ranks (see `forked_ranks`) in a simulated container with a memory limit."""

import json
import time

import ebbtide.runtime
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.hardware import usable
from ebbtide.runtime.hardware.cores import update_cores
from ebbtide.runtime.replan import auto
from ebbtide.runtime.replan.measuring import masks_of_this_host

from studies.bench.byte_gpt import SIZES, Batches
from tests.machines import node
from tests.runtime.contract.training import slowed, start, train

LIMIT_BYTES, USED_BYTES = 2**30, 2**29


def contained(folder):
    """Simulate a container: write the files of a control group with a memory limit into a folder, and make ebbtide
    read these files instead of the system's.
    """
    group = folder / "sys/fs/cgroup/job"
    (folder / "proc/self").mkdir(parents=True, exist_ok=True)
    group.mkdir(parents=True, exist_ok=True)
    (folder / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.max").write_text(f"{LIMIT_BYTES}\n")
    (group / "memory.current").write_text(f"{USED_BYTES}\n")
    usable.ROOT = folder


def main(folder, stage):
    stage = int(stage)
    asked, better, workloads, agreed, told = [], auto.better_plan, [], auto._agreed, []

    def note(workload, machine, current, device_bytes, host_bytes):
        found = better(workload, machine, current, device_bytes, host_bytes)
        asked.append([workload.ranks_per_node, workload.clip_rate, host_bytes])
        return found

    def note_workload(*mine):
        workloads.append(agreed(*mine))
        return workloads[-1]

    away = {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    engine = start(stage=stage, clipping=0.5, **away)
    rank = torch.distributed.get_rank()
    contained(folder / f"root{rank}")
    auto.better_plan, auto._agreed, auto.tell_faster = note, note_workload, lambda *run: told.append(run)
    auto._free_device_bytes = lambda device: 10**8 * (1 + rank)
    # All measured values differ between the ranks.
    device = slowed(1e9 / (1 + rank), 1e9, 1e9)
    ebbtide.runtime.attach(engine, "auto", device=device, machine=node(device_kind="emulated"))
    engine.module.register_forward_hook(lambda *_: time.sleep(0.02 * rank))
    losses, _ = train(engine, 6, batches=Batches(2, SIZES["tiny"].sequence, rank=rank))
    session = session_of(engine)
    [workload] = workloads
    found = {
        "ways": [list(way) for way in session.plan.ways],
        "order": str(session.plan.order),
        "expected_s": session.plan.prediction and session.plan.prediction.iteration_s,
        "agreed": [workload.ranks_per_node, workload.nodes, workload.forward_s, workload.backward_s],
        "clip_rate": workload.clip_rate,
        "steps": session.pausing.steps,
        "asked": asked,
        "told": len(told),
        "cores": update_cores(None, masks=masks_of_this_host()),
        "finite": all(torch.isfinite(loss) for loss in losses),
    }
    engine.destroy()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
