"""Training on two ranks (`forked_ranks`), with a search for races between memory accesses. The training is then
repeated several times, each time with one of the runtime's waits left out on purpose, which must cause races.
"""

import json
import os

import pytest
from ebbtide.runtime.execution.executor import Executor

from studies.bench.many_engines import freeze_heap
from tests.runtime import fake_cuda
from tests.runtime.contract.training import start
from tests.runtime.evidence.test_happens_before import (
    MIX,
    Partitions,
    brought_at_once,
    checked,
    nothing,
    with_gradients,
)

AHEAD = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 10**6,
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 0,
}
CASES = {
    "ZeRO-3": {"clipping": 0.1},
    "ZeRO-3, gathers ahead": AHEAD,
    "ZeRO-3, accumulation": {"accumulation": 2},
    "ZeRO-3, parameters on the host": {**AHEAD, "offload_param": {"device": "cpu"}},
    "ZeRO-2": {"stage": 2, "clipping": 0.1},
    # Gradients are reduced in place, in a bucket that the larger ones fill.
    "ZeRO-2, buckets of one": {"stage": 2, "reduce_bucket_size": 16_384, "reduce_scatter": False},
}
MUTANTS = {  # mutants of exchanges between ranks. The others run in one process
    "readers wait for nothing": ("ZeRO-3, gathers ahead", (Executor, "wait_parameters", nothing)),
    "parameters are exchanged before they are updated": ("ZeRO-2", (Executor, "wait_parameters", nothing)),
    "a gradient is copied before it is reduced": ("ZeRO-3, accumulation", with_gradients(reduced=False)),
    "a parameter is read before it is copied": (
        "ZeRO-3, parameters on the host",
        (Partitions, "bring", brought_at_once),
    ),
}


def races(case, mutant=None):
    """Train with the settings of one of `CASES` on this rank, with the fake CUDA, and look for races between memory
    accesses. The placements of the plan differ from rank to rank.

    Return the number of checked memory accesses, and a dict from race to its number of occurrences.
    """
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        fake = fake_cuda.install(patch)
        fake_cuda.install_under_deepspeed(patch, fake)
        if mutant:
            patch.setattr(*mutant)
        pattern = MIX[rank:] + MIX[:rank]
        engine = start(**CASES[case])
        early = {"speculate": 1, "speculate_visits": 1}
        fields = early if "ZeRO-3" in case else {}
        order = checked(fake, patch, engine, steps=2 if mutant else 3, pattern=pattern, **fields)
        fake.close()
    freeze_heap()
    return order.accesses, dict(order.races)


def main(folder):
    found = {case: races(case) for case in CASES}
    shown = {name: races(case, mutant) for name, (case, mutant) in MUTANTS.items()}
    path = folder / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps({"cases": found, "mutants": shown}))
