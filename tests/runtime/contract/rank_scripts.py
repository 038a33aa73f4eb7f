"""Random training scripts on two ranks, with stock DeepSpeed and under a plan (see `forked_ranks`).

A script trains, leaves modules out, runs them in another order, evaluates, reads, writes, saves, loads and switches
plans at random moments. Other scripts (`tests.runtime.contract.test_module_hooks`) read parameters anywhere. All values
that they see must be stock DeepSpeed's. A gather that one rank begins and the other does not would hang, until the time
limit of `forked_ranks`.

    torchrun --nproc-per-node 2 -m tests.runtime.contract.rank_scripts FOLDER FIRST LAST [SEED ...]
"""

import json
import os
import random
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from ebbtide.runtime.zero.attach import switch_plan
from ebbtide.simulator import workload as simulator_workload
from torch.utils.checkpoint import checkpoint

from studies.bench.bits import state_of
from studies.bench.byte_gpt import Batches, ByteGPT, ByteGPTConfig, TransformerBlock
from tests.runtime.contract import test_module_hooks
from tests.runtime.contract.training import DEVICES, attached, plan_for, start

SHAPE = ByteGPTConfig(layers=3, hidden=16, heads=2, sequence=8)
PLACEMENTS = ["host", "device", "resident", "stored"]
LENGTH = 14  # actions of a script
OVERFLOW = 1e9  # makes fp16 gradients overflow
LOWER = {"lower_precision_safe_modules": ["studies.bench.byte_gpt.Linear"]}
AUTOCAST = {"extra": {"torch_autocast": {"enabled": True, "dtype": "bfloat16", **LOWER}}, "precision": "fp32"}


class Wandering(ByteGPT):
    """A byte GPT whose attributes say which blocks a pass runs, in which order, and which of them twice.

    Its last small parameter is read from the model's own forward, and not from the module that owns it. Another small
    parameter is not trained.
    """

    def __init__(self):
        super().__init__(SHAPE)
        self.route, self.recompute, self.factor = [0, 1, 2], None, 1.0
        self.tilt = torch.nn.LayerNorm(SHAPE.hidden)
        self.blocks[1].norm_mlp.bias.requires_grad_(False)

    def forward(self, inputs, targets):
        x = self.bytes_in(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for number in self.route:
            block: TransformerBlock = self.blocks[number]
            if self.recompute is None or not self.training:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        logits = self.head(self.norm(x * self.tilt.weight)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) * self.factor


def configuration(rng):
    """Return a random config of DeepSpeed, and the fields of a random plan for each rank."""
    small = rng.choice([0, 20, 100, 300, 10**6])
    config = {
        "subgroup_size": rng.choice([1_001, 2_500, 6_000, 10**6]),
        "accumulation": rng.choice([1, 1, 2, 3]),
        "clipping": rng.choice([0.0, 1.0, 0.01]),
        "stage3_param_persistence_threshold": small,
        "stage3_prefetch_bucket_size": rng.choice([0, 800, 3_000, 10**6]),
        "stage3_max_live_parameters": rng.choice([2_000, 10**6]),
        "stage3_max_reuse_distance": rng.choice([0, 3_000, 10**6]),
        **rng.choice([{}, {}, {"precision": "fp16"}, AUTOCAST]),
    }
    if rng.random() < 0.3:
        config["offload_param"] = {"device": "cpu"}
    plans = []
    for rank in range(2):
        away = bool(config.get("offload_param"))
        plans.append(
            {
                "pattern": rng.choices(PLACEMENTS, k=3),
                "locations": [rng.choice(["host", "device"]) if away else "device" for _ in range(2)],
                "speculate": rng.choice([0, 2]),
                "host_slots": 2,
                "device_sums": rng.choice([0, 1]),
                "order_seed": rng.choice([None, rank]),
            }
        )
    overlaps = rng.random() < 0.9
    return config, [{**plan, "overlap_forward": overlaps} for plan in plans]


class Script:
    """A script on one engine. Its methods are the actions. Each of them appends what it saw to ``notes``."""

    def __init__(self, engine, rng, folder, rank, plans):
        self.engine, self.rng, self.folder, self.rank, self.plans = engine, rng, folder, rank, plans
        self.notes, self.number, self.saved = [], 0, []
        self.ahead = False  # DeepSpeed may be gathering large parameters, which it does not let code read
        self.open = 0  # micro-batches since the last step

    def run(self):
        names = [name for name in vars(Script) if not name.startswith("_") and name != "run"]
        self.train()
        self.train()
        for _ in range(LENGTH):
            name = self.rng.choice([*names, *["train"] * 6])
            getattr(self, name)()
        self.train()
        while self.open:  # a step ends what DeepSpeed gathers ahead
            self.train()
        self.notes.extend(state_of(self.engine).values())
        return self.notes

    def _batch(self):
        self.number += 1
        return Batches(2, SHAPE.sequence, rank=self.rank).at(self.number, self.engine.device)

    def train(self):
        model = self.engine.module
        forwards = self.rng.choice([1, 1, 1, 2])
        # Stock DeepSpeed refuses two gradients of a parameter in one backward, which reentrant recomputation makes.
        once = forwards == 1 and len(model.route) <= 3
        model.recompute = self.rng.choice([None, None, True if once else None])
        loss = sum(self.engine(*self._batch()) for _ in range(forwards))
        self.engine.backward(loss)
        self.engine.step()
        self.open = (self.open + 1) % self.engine.gradient_accumulation_steps()
        self.notes.append(loss.detach().clone())
        self.ahead = bool(self.open)

    def reroute(self):
        blocks = [0, 1, 2]
        self.engine.module.route = self.rng.choice([blocks, blocks, [2, 1, 0], [0, 2], [1], [0, 1, 1, 2]])

    def overflow(self):
        self.engine.module.factor = OVERFLOW
        self.train()
        self.engine.module.factor = 1.0

    def evaluate(self):
        self.engine.eval()
        route = self.engine.module.route
        self.reroute()
        with torch.no_grad():
            self.notes.append(self.engine(*self._batch()).clone())
        self.engine.module.route = route
        self.engine.train()
        self.ahead = True

    def part(self):
        block = self.engine.module.blocks[self.rng.randrange(3)]
        x = torch.ones(1, SHAPE.sequence, SHAPE.hidden, dtype=self.engine.module.blocks[0].norm_mlp.weight.dtype)
        with torch.no_grad():
            self.notes.append(block(x.to(self.engine.device)).clone())
        self.ahead = True

    def _parameters(self):
        limit = self.engine.optimizer.persistent_parameters if self.ahead else list(self.engine.module.parameters())
        return self.rng.sample(limit, min(len(limit), self.rng.randint(1, 5)))

    def read(self):
        chosen = self._parameters()
        if chosen:
            with GatheredParameters(chosen):
                self.notes.extend(p.detach().clone() for p in chosen)

    def write(self):
        chosen = self._parameters()
        if chosen and not self.open:
            with GatheredParameters(chosen, modifier_rank=0):
                for p in chosen:
                    p.data.mul_(1.0 + 0.25 * (self.rank == 0))

    def state(self):
        trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        for p in self.rng.sample(trained, 3):
            self.notes.append(safe_get_full_fp32_param(p).clone())
            moment = safe_get_full_optimizer_state(p, "exp_avg")
            self.notes.append(torch.zeros(()) if moment is None else moment.clone())

    def save(self):
        if not self.open and not self.ahead:
            self.saved.append(f"step{self.number}")
            self.engine.save_checkpoint(str(self.folder), tag=self.saved[-1])

    def load(self):
        if self.saved and not self.open and not self.ahead:
            self.engine.load_checkpoint(str(self.folder), tag=self.rng.choice(self.saved))

    def partition(self):
        if not self.ahead:
            self.engine.empty_partition_cache()

    def switch(self):
        chosen = self.rng.randrange(10)
        if not self.open and self.plans is not None:
            plan = self.plans[self.rank] | {"order_seed": chosen}
            switch_plan(self.engine, plan_for(self.engine, **{**plan, "pattern": plan["pattern"][::-1]}))


def played(seed, folder, rank, ours, watch=None):
    """Play a script, and return what it saw.

    Args:
        watch: Function that is called with the engine before the script begins. Parameters are then in host
            memory, apart from the device's.
    """
    rng = random.Random(seed)
    config, plans = configuration(rng)
    if watch is not None:
        config["offload_param"] = {"device": "cpu"}
        if seed % 2:  # half of the model may be there
            config |= {"stage3_prefetch_bucket_size": 3_000, "stage3_max_live_parameters": 9_000}
        plans = [{**plan, "locations": ["host"]} for plan in plans]
    model = Wandering()
    engine = start(
        model, parameters=lambda model: [p for p in model.parameters() if p.requires_grad], learning_rate=1e-2, **config
    )
    device = rng.choice(sorted(DEVICES)) if watch is None else list(DEVICES)[-1]
    if ours:
        attached(engine, device=device, seed=seed + rank, subgroup=config["subgroup_size"], **plans[rank])
    if watch is not None:
        watch(engine)
    script = Script(engine, rng, folder / f"{seed}-{ours}", rank, plans if ours else None)
    try:
        return script.run()
    finally:
        engine.destroy()


def main(folder, first, last, *more):
    rank, wrong, failed = int(os.environ["RANK"]), {}, {}
    simulator_workload.LEAST_GATHERED = 1_001  # elements, so that a step of ZeRO-2 has several exchanges
    for seed in [*range(int(first), int(last)), *map(int, more)]:
        for name, play, differ in (
            ("wanders", lambda seed, ours: played(seed, folder, rank, ours), _different),
            ("reads", lambda seed, ours: test_module_hooks.played(seed, ours, rank), test_module_hooks.different),
            (
                "reads under ZeRO-2",
                lambda seed, ours: test_module_hooks.played(seed, ours, rank, stage=2),
                test_module_hooks.different,
            ),
        ):
            try:
                stock = play(seed, False)
            except (AssertionError, RuntimeError, KeyError) as error:
                failed[f"{name} {seed}"] = repr(error)[:200]  # with stock DeepSpeed, and on both ranks
                continue
            bad = differ(stock, play(seed, True))
            if bad:
                wrong[f"{name} {seed}"] = str(bad)[:2000]
    (folder / f"scripts{rank}.json").write_text(json.dumps(wrong))
    (folder / f"stock_failed{rank}.json").write_text(json.dumps(failed))


def _different(stock, ours):
    pairs = enumerate(zip(stock, ours, strict=True))
    return [number for number, (a, b) in pairs if a.dtype != b.dtype or not _equal(a, b)]


def _equal(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


if __name__ == "__main__":
    deepspeed.init_distributed()
    main(Path(sys.argv[1]), *sys.argv[2:])
