"""A training process of `studies.training_thread`, which measures the CPU time of the training thread.

    python -m studies.training_thread.process VARIANT LAYERS --out PATH

The model has the layers, modules and parameters of a large one, but is 16 wide, so that almost all time is Python.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from ebbtide.runtime import attach
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.devices.lane import Completion, LaneQueue
from ebbtide.runtime.zero.attach import session_of
from ebbtide.runtime.zero.flat_partitions import subgroups_of
from ebbtide.simulator import Plan
from ebbtide.simulator.schedule import Lane as LaneName

from studies.bench.bits import MOMENTS, digest
from studies.bench.byte_gpt import ByteGPT, ByteGPTConfig, ds_config
from studies.bench.rank import become_only_rank

VARIANTS = ("torch", "stock", "ebbtide", "mixed", "fetched", "stock-zero2", "ebbtide-zero2")
HIDDEN, SEQUENCE = 16, 8
LAYER = 12 * HIDDEN * HIDDEN + 13 * HIDDEN
WARM_UP = 10


class IssuingDevice(EmulatedDevice):
    """An emulated device without lanes for gradients.

    The training thread issues the copies of gradients itself, with events, as on CUDA. The copies are made at once, and
    the events take no time of a driver.
    """

    def lanes(self) -> dict[LaneName, LaneQueue]:
        lanes = super().lanes()
        for name in (LaneName.D2H_GRADIENTS, LaneName.H2D_GRADIENTS):
            lanes[name].close()
            lanes[name] = LaneQueue(name.value, _Stream(), lambda _: _PastEvent(), own_thread=False)
        return lanes

    def current_event(self) -> "_PastEvent":
        return _PastEvent()

    def training_streams(self) -> list[Any]:
        return [_Stream()]

    def leaving(self, source: torch.Tensor, stream: Any) -> torch.Tensor:
        del stream
        return source

    def before_reuse(self, copied: Completion) -> None:
        del copied


class _Stream:
    def wait_event(self, event: "_PastEvent") -> None:
        pass


class _PastEvent:
    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.training_thread.process", description=__doc__)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("layers", type=int)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    become_only_rank(quiet=True)
    torch.set_num_threads(1)
    measured = measure(args.variant, args.layers, args.iterations)
    if int(os.environ["RANK"]) == 0:
        args.out.write_text(json.dumps(measured))
    os._exit(0)  # DeepSpeed may hang at the end of a process with several ranks


def measure(variant: str, layers: int, iterations: int) -> dict[str, Any]:
    """Train a model, and return the milliseconds of CPU time that an iteration takes of the training thread."""
    torch.manual_seed(0)
    model = ByteGPT(ByteGPTConfig(layers=layers, hidden=HIDDEN, heads=2, sequence=SEQUENCE))
    step, finish, engine = _trained_by(variant, model)
    torch.manual_seed(1 + int(os.environ["RANK"]))
    batches = [tuple(torch.randint(0, 256, (2, 1, SEQUENCE))) for _ in range(4)]
    gathers = _counted_gathers()
    rows, losses = [], []
    for number in range(WARM_UP + iterations):
        if number == WARM_UP:
            gc.collect()
            gc.freeze()
            gathers.clear()
        *phases, loss = step(*batches[number % 4])
        finish()
        rows.append(phases)
        losses.append(float(loss))
    forward, backward, update = (1e3 * statistics.median(phase) for phase in zip(*rows[WARM_UP:], strict=True))
    return {
        "parameters": len(list(model.parameters())),
        "forward_ms": forward,
        "backward_ms": backward,
        "step_ms": update,
        "total_ms": forward + backward + update,
        "gathers": len(gathers) / iterations,
        "digest": "" if engine is None else digest([*_state(model), torch.tensor(losses, dtype=torch.float64)]),
    }


Step = Callable[[torch.Tensor, torch.Tensor], tuple[float, float, float, torch.Tensor]]


def _trained_by(variant: str, model: ByteGPT) -> tuple[Step, Callable[[], None], Any]:
    now = time.thread_time
    if variant == "torch":
        model.to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def plain(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float, torch.Tensor]:
            t0 = now()
            loss = model(inputs, targets)
            t1 = now()
            loss.backward()
            t2 = now()
            optimizer.step()
            optimizer.zero_grad()
            return t1 - t0, t2 - t1, now() - t2, loss.detach()

        return plain, lambda: None, None
    engine = _engine(variant, model)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float, torch.Tensor]:
        t0 = now()
        loss = engine(inputs, targets)
        t1 = now()
        engine.backward(loss)
        t2 = now()
        engine.step()
        return t1 - t0, t2 - t1, now() - t2, loss.detach()

    if variant.startswith("stock"):
        return step, lambda: None, engine
    return step, session_of(engine).executor.wait_all, engine


def _engine(variant: str, model: ByteGPT) -> Any:
    planned, stage = not variant.startswith("stock"), 2 if variant.endswith("zero2") else 3
    # The sizes of the run on an H200 (1.3 B parameters, 26 layers), scaled by the size of a layer.
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": LAYER if planned else 10 * LAYER,  # what ebbtide sets, and DeepSpeed's own
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 100,
            "stage3_prefetch_bucket_size": LAYER,
            "stage3_max_live_parameters": 20 * LAYER,
            "stage3_max_reuse_distance": 20 * LAYER,
        }
    config = ds_config(1, 2 * LAYER, **zero)
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    if planned:
        count = len(subgroups_of(engine.optimizer, 2 * LAYER))
        plan = {"subgroup_size": 2 * LAYER, "ways": _ways(variant, count)}
        attach(engine, Plan.from_fields(plan), device=IssuingDevice())
    return engine


def _ways(variant: str, count: int) -> list[dict[str, Any]]:
    if variant != "mixed":
        return [{"count": count, "placement": "host", "parameters": "host" if variant == "fetched" else "device"}]
    resident = max(1, count * 4 // 14)  # as in the run on an H200
    return [
        {"count": resident, "placement": "resident"},
        {"count": count - resident - 3, "placement": "host"},
        {"count": 1, "placement": "host", "early": True},
        {"count": 2, "placement": "host"},
    ]


def _counted_gathers() -> list[None]:
    made, gather = list[None](), deepspeed.comm.allgather_fn

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(None)
        return gather(*args, **kwargs)

    deepspeed.comm.allgather_fn = counted
    return made


def _state(model: torch.nn.Module) -> list[torch.Tensor]:
    state = []
    for parameter in model.parameters():
        state.append(safe_get_full_fp32_param(parameter))
        state += [safe_get_full_optimizer_state(parameter, key) for key in MOMENTS]
    return state


if __name__ == "__main__":
    main()
