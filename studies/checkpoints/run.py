"""The training run that the crash study of checkpoints kills: a tiny model in real DeepSpeed.

Importing DeepSpeed takes seconds, so the study imports it once and then forks its runs. The ranks
of a run are separate processes, each with its own engine, threads and files.
"""

import contextlib
import importlib
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, get_args

import xxhash
from ebbtide.simulator import CheckpointPlan, Plan, Way
from ebbtide.simulator.plan import ParameterLocation, Placement
from ebbtide.simulator.update.recipes import RECIPES

from studies.bench import killed
from studies.bench.forked import Forked

STEPS = 8
MICRO_BATCHES = 2  # micro-batches of a step under a plan. Their sums stay on the device until the last one
STORED, GUESSED = "stored", "guessed"
BUDGET_BYTES = 8 * 65536  # a part of the state, so that updates also wait for the disk
BLOCK_BYTES = 65536
SUBGROUP = 20_000
HOMES: Mapping[str, tuple[ParameterLocation, ...]] = {  # assigned to the subgroups in turn
    "host": ("host",),
    "mixed": ("device", "host"),
    "device": ("device",),
    STORED: ("device",),
    GUESSED: ("device",),
}
CLIPPING = 5.0  # under a plan: the first step is clipped, and few of the later ones
WRITE_BYTES_PER_S = 30e6  # with this rate, writing a checkpoint takes about two steps


@dataclass(frozen=True)
class RankKill(killed.Kill):
    """A SIGKILL of one rank of a training run: its moment, the rank, and how the run saves its checkpoints.

    Attributes:
        one_tag: True if the run saves every checkpoint under the same tag, so that a checkpoint replaces the previous
            one.
        exchange: False if the run saves as on a filesystem that cannot swap two names in one step.
    """

    rank: int = 0
    one_tag: bool = False
    exchange: bool = True


class RankKillingFiles(killed.KillingFiles):
    """File operations of a checkpoint that kill one rank at a named point of the code.

    Before the kill, they note in a file that the point was reached.
    """

    def __init__(self, kill: RankKill, rank: int, mark: Path) -> None:
        super().__init__(kill if rank == kill.rank else replace(kill, point=""))
        self._exchanges, self._mark = kill.exchange, mark

    def exchange(self, one: Path, other: Path) -> bool:
        return self._exchanges and super().exchange(one, other)

    def hit(self, name: str) -> bool:
        if not super().hit(name):
            return False
        self._mark.write_text(name)
        return True


@dataclass(frozen=True)
class KilledRun:
    """One training run, with all its ranks, of the study that kills training during checkpoints.

    Attributes:
        folder: Folder of the checkpoints. Logs and notes are written next to it.
        number: 0 for the run that is killed, 1 for the run that resumes in the same folder.
        homes: Key of `HOMES`, which says where the plan keeps the 16-bit parameters. With any key, updates run during
            the next forward. The key ``stored`` also puts a part of the optimizer state on storage. The key ``guessed``
            makes all updates early, and lets some steps clip. If empty, there is no plan, and DeepSpeed updates the
            state.
    """

    folder: Path
    world_size: int
    number: int
    port: int
    kill: RankKill = RankKill()
    steps: int = STEPS
    homes: str = ""

    @property
    def stored_in(self) -> Path:
        return self.folder.parent / "stored"

    def note(self, kind: str, rank: int) -> Path:
        return self.folder.parent / f"{kind}_{self.number}_{rank}"


# Modules that making, attaching and resuming an engine imports. Otherwise each forked process would import them.
IMPORTED_LATE = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.distributed.nn.functional",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "ebbtide.runtime.zero.attach",
    "ebbtide.runtime.zero.stage3",
    "torch._dynamo.config",  # imported when a checkpoint is read
)


def warm_up() -> None:
    """Import modules and load compiled ops once, before any training process is forked.

    DeepSpeed's check for a GPU is made through NVML. A check through the CUDA driver would leave every
    forked process unable to use the GPU.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import ebbtide.runtime.checkpoint.deepspeed.engine
    import torch
    from deepspeed.comm.torch import build_shm_op

    from studies.bench.byte_gpt import python_sources

    for module in IMPORTED_LATE:
        with contextlib.suppress(ModuleNotFoundError):  # some versions of DeepSpeed lack one of these modules
            importlib.import_module(module)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports torch._dynamo
    torch.set_num_threads(1)
    build_shm_op()
    python_sources()
    importlib.import_module(ebbtide.runtime.checkpoint.deepspeed.engine.__name__)


def start(run: KilledRun) -> list[Forked]:
    """Fork one process per rank of a training run, and return the list of processes."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    return [Forked(partial(train, run, rank), run.note("log", rank)) for rank in range(run.world_size)]


def train(run: KilledRun, rank: int) -> None:
    """Train as one rank of a run up to the run's last step, from the newest checkpoint if there is one."""
    import torch
    import torch.distributed

    engine, lazy = _engine(run, rank)
    begin, chain = _resume(engine, run)
    acknowledged = -1
    lazy.client_state = lambda: {"chain": chain}
    run.note("ready", rank).touch()
    with run.note("steps", rank).open("a", buffering=1) as steps:
        for step in range(begin, run.steps):
            for micro_step in range(engine.gradient_accumulation_steps()):
                if micro_step:
                    engine.step()
                batch = _batch(rank, step + micro_step * run.steps, engine.device)
                loss = engine(*batch)
                engine.backward(loss)
            drawn = f"{chain}{random.random()}{torch.rand(1).item()}"
            chain = xxhash.xxh3_64_hexdigest(drawn.encode())
            engine.step()
            tag = "rolling" if run.kill.one_tag else f"step{step + 1}"
            engine.save_checkpoint(str(run.folder), tag=tag, client_state={"chain": chain})
            # Hashing the state waits for the updates. In every other step it is left out, so that updates continue.
            digest = "" if run.homes and step % 2 == 0 else state_hash(engine)
            steps.write(json.dumps([step + 1, digest, chain]) + "\n")
            if lazy.last is not None and lazy.last.step > acknowledged:
                acknowledged = lazy.last.step
                run.note("committed", rank).write_text(str(acknowledged))
    lazy.wait()
    run.note("committed", rank).write_text(str(run.steps))
    torch.distributed.barrier()
    engine.destroy()
    run.note("finished", rank).touch()


def _engine(run: KilledRun, rank: int) -> tuple[Any, Any]:
    import deepspeed
    import torch
    from ebbtide.runtime.checkpoint import install

    from studies.bench.byte_gpt import SIZES, ByteGPT, ds_config

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(run.world_size),
        LOCAL_SIZE=str(run.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(run.port),
    )
    random.seed(1 + rank)
    torch.manual_seed(1 + rank)
    model = ByteGPT(SIZES["tiny"])
    plan = CheckpointPlan(
        copy_budget_bytes=BUDGET_BYTES,
        keep=2,
        write_bytes_per_s=WRITE_BYTES_PER_S / run.world_size,
        restore_random=True,  # the model draws random numbers, so a bit-identical resume needs their state
    )
    files = RankKillingFiles(run.kill, rank, run.note("reached", rank))
    options: dict[str, Any] = {"files": files, "block_bytes": BLOCK_BYTES}
    if run.homes:
        return _planned_engine(model, plan, run, options)
    # torch's Adam, because DeepSpeed's own rounds powers of beta differently after a resume.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    config = {**ds_config(2, SUBGROUP), "zero_force_ds_cpu_optimizer": False}
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, install(engine, plan, **options)


def _planned_engine(model: Any, checkpoint: CheckpointPlan, run: KilledRun, options: dict[str, Any]) -> tuple[Any, Any]:
    import ebbtide.runtime.checkpoint
    import ebbtide.runtime.storage.store

    from studies.bench.byte_gpt import ds_config, stock_engine

    # Code in this process that installs the checkpoint engine does so with these options.
    ebbtide.runtime.checkpoint.install = partial(ebbtide.runtime.checkpoint.install, **options)  # type: ignore[assignment]
    vars(ebbtide.runtime.storage.store)["Files"] = lambda: options["files"]
    here = run.homes in (STORED, GUESSED)
    offload: dict[str, Any] = {} if here else {"offload_param": {"device": "cpu"}}
    config = ds_config(2, SUBGROUP, clipping=CLIPPING, accumulation=MICRO_BATCHES, **offload)
    engine = stock_engine(model, config)
    count = len(engine.optimizer.fp16_groups)
    plan = _plan(count, HOMES[run.homes], run.stored_in if run.homes == STORED else None)
    if run.homes == GUESSED:
        plan = plan.placed(["host"] * count).with_bits(early=True)
    ebbtide.runtime.attach(engine, plan, device="emulated", checkpoint=checkpoint)
    return engine, engine.checkpoint_engine


def _plan(count: int, homes: Sequence[ParameterLocation], storage: Path | None) -> Plan:
    used = [p for p in get_args(Placement) if storage or RECIPES[p].state != "storage"]
    if storage:  # checked first: each of two ranks has three subgroups
        used.reverse()
    placements = list(islice(cycle(used), count))
    return Plan(
        subgroup_size=SUBGROUP,
        ways=tuple(
            Way(p, home, sum_on_device=True).fitted() for p, home in zip(placements, cycle(homes), strict=False)
        ),
        staging_slots=2,
        prefetch=1,
        storage_dir=None if storage is None else str(storage),
    )


def _resume(engine: Any, run: KilledRun) -> tuple[int, str]:
    if not run.folder.is_dir():
        return 0, ""
    path, client_state = engine.load_checkpoint(str(run.folder))
    if path is None:
        return 0, ""
    return engine.global_steps, client_state["chain"]


def _batch(rank: int, step: int, device: Any) -> Any:
    import torch

    from studies.bench.byte_gpt import SIZES, Batches

    inputs, targets = Batches(2, SIZES["tiny"].sequence, rank=rank).at(step, device)
    shift = int(torch.randint(0, 256, (1,)))
    return (inputs + shift) % 256, targets


def state_hash(engine: Any) -> str:
    """Return one hash of all bits of an engine's training state that further training depends on.

    The hash covers the fp32 masters, the Adam moments and the 16-bit parameters.
    """
    import torch

    from studies.bench.bits import digest

    optimizer = engine.optimizer
    tensors = [*optimizer.fp32_partitioned_groups_flat, *optimizer.fp16_partitioned_groups_flat]
    for state in optimizer.optimizer.state.values():
        tensors.extend(value for _, value in sorted(state.items()) if torch.is_tensor(value))
    return digest(tensors)


def recorded(run: KilledRun, rank: int) -> Iterator[tuple[int, str, str]]:
    """Yield the notes that one rank of a training run wrote to its file, one for each finished step.

    A note has the step's number, a hash of the training state, and a hash of the random numbers so far.
    """
    path = run.note("steps", rank)
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            step, digest, chain = json.loads(line)
        except ValueError:  # the process was killed while writing the last line
            return
        yield step, digest, chain


def reap(ranks: Sequence[Forked], timeout_s: float) -> list[int]:
    """Wait for the rank processes of a training run, and kill those still running after ``timeout_s`` seconds."""
    end = time.monotonic() + timeout_s
    return [rank.ended(end - time.monotonic()) for rank in ranks]
