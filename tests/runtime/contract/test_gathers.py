"""Tests of plans under which 16-bit parameters live in host memory.

The bytes copied to the GPU for each pass equal the simulator's. Evaluation, reads, writes and saves
between steps show stock DeepSpeed's values.
"""

import pytest
import torch
from ebbtide.runtime import session_of
from ebbtide.runtime.replan.observed import observed_workload
from ebbtide.simulator import build_schedule
from ebbtide.simulator.estimates.estimate import estimated
from ebbtide.simulator.estimates.job import Job
from ebbtide.simulator.estimates.presets import preset
from ebbtide.simulator.schedule import OpKind

from studies.bench.bits import differences, state_of
from studies.bench.byte_gpt import SIZES, Batches, ByteGPT, ds_config
from tests.runtime.contract.test_bits import EVERY_PASS, ReadsAnothersParameter
from tests.runtime.contract.training import EMULATED, SUBGROUP, attached, plan_for, start, train

pytestmark = [
    pytest.mark.usefixtures("only_rank"),
    pytest.mark.skipif(not EMULATED, reason="counts bytes, which do not depend on the device"),
]
OFFLOAD = {"offload_param": {"device": "cpu"}}
ALONE = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}


class Recomputing(ByteGPT):
    """A byte GPT with activation recomputation: each block keeps only its input and is computed again in backward."""

    def forward(self, inputs, targets):
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.bytes_in(inputs) + self.positions(places)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


CASES = {
    "DeepSpeed's defaults": (ByteGPT, {}),
    "every pass": (ByteGPT, EVERY_PASS),
    "nothing is kept or asked for ahead": (ByteGPT, {**ALONE, "stage3_max_reuse_distance": 0}),
    "some of them": (ByteGPT, {**ALONE, "stage3_max_reuse_distance": 60_000}),
    "the bucket keeps what it sees": (
        ByteGPT,
        {**ALONE, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 50_000},
    ),
    "small ones stay for micro-batches": (
        ByteGPT,
        {
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 300,
            "accumulation": 3,
        },
    ),
    "computed again": (Recomputing, {**ALONE, "stage3_max_reuse_distance": 0}),
    "computed again, with reuse": (Recomputing, {**ALONE, "stage3_max_reuse_distance": 60_000}),
    "another's parameter": (ReadsAnothersParameter, {**ALONE, "stage3_max_reuse_distance": 0}),
}


def fetched(engine):
    """Return a list of the bytes of parameters that were copied from host memory to the GPU in each step after
    the first four.

    In the first steps DeepSpeed still records its trace of modules.
    """
    records = list(session_of(engine).executor.history)[4:]
    return [sum(op.work for op, _ in r.ops if op.kind is OpKind.PARAMETER_FETCH) for r in records]


def simulated(workload, plan):
    schedule = build_schedule(workload, plan, 1)
    return sum(op.work for op in schedule.ops if op.kind is OpKind.PARAMETER_FETCH)


@pytest.mark.parametrize("case", list(CASES))
def test_what_comes_in_is_what_is_fetched(case):
    model, config = CASES[case]
    engine = attached(start(model=model(SIZES["tiny"]), **OFFLOAD, **config), ["host"], "emulated", seed=None)
    own = session_of(engine)
    train(engine, 7 * config.get("accumulation", 1))
    told = simulated(observed_workload(own.engine, own.recorder.passes()), own.plan)
    assert fetched(engine) == [told] * 3
    engine.destroy()


@pytest.mark.parametrize(("reuse", "recompute"), [(0, False), (0, True), (12_000, True), (10**9, False)])
def test_what_a_config_says_before_anything_runs(reuse, recompute):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    zero = {"stage3_max_reuse_distance": reuse, "stage3_param_persistence_threshold": 100}
    if reuse < 10**9:  # the distance that DeepSpeed looks ahead also depends on modules without parameters
        zero["stage3_prefetch_bucket_size"] = 0
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    engine = attached(
        start(model=model, accumulation=2, subgroup_size=5_000, **OFFLOAD, **zero),
        ["host"],
        "emulated",
        seed=None,
        subgroup=5_000,
    )
    tokens = torch.arange(16).view(1, 16)
    for _ in range(14):
        engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        engine.step()
    config = {"zero_optimization": {"stage": 3, "sub_group_size": 5_000, **zero, **OFFLOAD}, "bf16": {"enabled": True}}
    job = Job.of_deepspeed(
        {"model_type": "llama", **shape}, config, micro_batch=1, accumulation=2, sequence=16, recompute=recompute
    )
    work = estimated(job, preset("h100-node"))
    engine.optimizer.wait()
    assert set(fetched(engine)) == {simulated(work, plan_for(engine, ["host"], 5_000))}
    engine.destroy()


ON_SAVE = {"stage3_gather_16bit_weights_on_model_save": True}


def born_partitioned(**config):
    """Return a training engine on a model that was built under DeepSpeed's ``zero.Init``, with the same
    weights on all ranks.
    """
    import deepspeed

    settings = {**OFFLOAD, **ON_SAVE, **EVERY_PASS, "accumulation": 2, **config}
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=ds_config(2, SUBGROUP, **settings)):
        model = Recomputing(SIZES["tiny"])
    return start(model=model, **settings)


def a_life(engine, folder, rank=0):
    """Train, evaluate, read, change and save the model of an engine.

    Return a list of all tensors that these actions gave, to be compared with those of another engine.
    """
    from deepspeed.runtime.zero import GatheredParameters

    batches, notes = Batches(2, SIZES["tiny"].sequence, rank=rank), []

    def look(engine, number):
        with GatheredParameters(list(engine.module.parameters())):
            notes.extend(p.detach().clone() for p in engine.module.parameters())
        with GatheredParameters(list(engine.module.head.parameters()), modifier_rank=0):
            engine.module.head.weight.data.mul_(0.5 + rank)  # only the first rank's values count
        # Last, because the gathers that it starts ahead stay in flight until the next forward, as in DeepSpeed.
        engine.eval()
        with torch.no_grad():
            notes.append(engine(*batches.at(number + 100, engine.device)).clone())
        engine.train()

    notes += train(engine, 6, batches=batches, each=look)[0]
    notes += train(engine, 2, first=6, batches=batches)[0]
    engine.save_16bit_model(str(folder), "weights.bin")
    engine.save_checkpoint(str(folder))
    later = train(engine, 2, first=8, batches=batches)[0]  # while the checkpoint is being written
    engine.destroy()
    if rank == 0:
        notes += torch.load(folder / "weights.bin", weights_only=True).values()
    return [*notes, *later]


def loaded(engine, folder, rank=0):
    """Load a checkpoint into an engine. Return the engine's state and the losses of the next two micro-batches."""
    assert engine.load_checkpoint(str(folder))[0] is not None
    state = state_of(engine)
    losses = train(engine, 2, first=8, batches=Batches(2, SIZES["tiny"].sequence, rank=rank))[0]
    engine.destroy()
    return state, losses


def alive_as_stock(folder, rank=0):
    """Train the same steps with stock DeepSpeed and under a plan. Save a checkpoint in each of the two runs, and then
    train two more micro-batches. Load each checkpoint into an engine of the other kind, and train these two
    micro-batches again. `test_ranks` calls this function on two ranks.

    Returns:
        A list of all differences, empty if there are none:

        - The index of each value, such as a loss or a parameter, that differs between the two runs.
        - The name of each tensor that differs between the two engines that have loaded a checkpoint.
        - The number 1 if the last loss differs between the stock run and the engine that loaded its checkpoint.
        - The number 2 if the second-to-last loss differs between the stock run and this engine.
    """
    pattern, locations = ["host", "device", "resident"], ["host", "host", "device"]

    def ours():
        return attached(born_partitioned(), pattern, "emulated", seed=rank, locations=locations)

    notes = [a_life(new(), folder / name, rank) for name, new in (("stock", born_partitioned), ("ours", ours))]
    wrong = [i for i, (a, b) in enumerate(zip(*notes, strict=True)) if not torch.equal(a, b)]
    there = loaded(born_partitioned(), folder / "ours", rank)
    back = loaded(ours(), folder / "stock", rank)
    # After a load, DeepSpeed computes powers of the betas in another way. Under a plan, training continues as without
    # the load.
    wrong += differences(there[0], back[0])
    return wrong + [n for n in (1, 2) if not torch.equal(back[1][-n], notes[0][-n])]
