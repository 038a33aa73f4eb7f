"""The same training with Trainer, Accelerate and Lightning, with stock DeepSpeed and with the config key ``ebbtide``.

As a program, this module runs all three on two ranks and reports the differences. A test in one process calls
the module's functions.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import ebbtide.runtime
import torch
from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers

from studies.bench.bits import differences, state_of
from studies.bench.forked import Forked
from studies.bench.many_engines import freeze_heap, remember_processor
from tests.runtime.forked_ranks import LIMIT_S, RANKS, variables

STEPS = 8
SUBGROUP = 2048  # elements. Each of two ranks then has a subgroup with each placement
VOCABULARY, SEQUENCE, BATCH = 64, 16, 2
PATTERN = ("host", "device", "resident")
_TIMED = ("_runtime", "_per_second")
Outcome = tuple[dict[str, torch.Tensor], list[Any]]


def model(**fields: Any) -> Any:
    """Return a tiny Llama model with the same random weights each time. ZeRO-3 partitions it while it is made."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "pad_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**settings | fields))


def samples(count: int = 2 * STEPS * BATCH) -> list[dict[str, torch.Tensor]]:
    """Return samples of random tokens, as a dataset for any of the trainers."""
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (count, SEQUENCE), generator=rng)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens]


def ds_config(key: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    """Return a DeepSpeed config with "auto" for the values that Trainer, Accelerate or Lightning fills in."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUBGROUP,
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 100,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    made |= extra
    return made if key is None else {**made, "ebbtide": key}


def key_for(engine: Any) -> dict[str, Any]:
    """Return a value of the config key ``ebbtide``: a plan with every placement for the subgroups of an engine."""
    from ebbtide.runtime.zero.flat_partitions import subgroups_of
    from ebbtide.simulator.plan import Plan

    count = len(subgroups_of(engine.optimizer, SUBGROUP))
    overlap = engine.zero_optimization_stage() == 3
    placements = [PATTERN[i % len(PATTERN)] for i in range(count)]
    plan = Plan(subgroup_size=SUBGROUP, placement=Plan.runs(placements), prefetch=1, overlap_forward=overlap)

    return {"plan": plan.model_dump(mode="json"), "device": "emulated"}


def with_trainer(key: dict[str, Any] | None, **options: Any) -> tuple[Any, list[Any]]:
    """Train with Hugging Face's Trainer, and return the final engine and the Trainer's log."""
    import transformers

    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": True,
        "disable_tqdm": True,
        "warmup_steps": 3,
        "max_grad_norm": 0.5,
        "output_dir": tempfile.mkdtemp(),
    }
    config = ds_config(key, **options.pop("config", {}))
    wrap, callbacks = options.pop("wrap", lambda net: net), options.pop("callbacks", list)()
    made = transformers.TrainingArguments(**arguments | options, deepspeed=config)
    net = wrap(model())
    data = samples()
    trainer = transformers.Trainer(model=net, args=made, train_dataset=data, eval_dataset=data[:3], callbacks=callbacks)
    trainer.train()
    return trainer.deepspeed, logged(trainer) + saved_models(Path(made.output_dir))


def saved_models(folder: Path) -> list[Any]:
    """Return the names and hashes of the 16-bit model files that a trainer saved in a folder."""
    return [
        (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*.safetensors"))
    ]


def with_sft(key: dict[str, Any] | None, **options: Any) -> tuple[Any, list[Any]]:
    """Train with TRL's SFTTrainer on samples that are already tokenized. Return the final engine and the log."""
    import datasets
    import transformers
    import trl
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, **{f"w{n}": n for n in range(1, VOCABULARY)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="w1"
    )
    made = trl.SFTConfig(
        max_steps=6,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=True,
        disable_tqdm=True,
        output_dir=tempfile.mkdtemp(),
        deepspeed=ds_config(key, **options),
    )
    rows = [{"input_ids": sample["input_ids"].tolist()} for sample in samples()]
    trainer = trl.SFTTrainer(
        model=model(), args=made, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    return trainer.deepspeed, logged(trainer)


def logged(trainer: Any) -> list[Any]:
    """Return the log of a transformers Trainer, without the times in it."""
    return [{k: v for k, v in row.items() if not k.endswith(_TIMED)} for row in trainer.state.log_history]


def with_lora(net: Any) -> Any:
    """Wrap a model with LoRA, so that all its parameters are frozen but a few new ones."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return get_peft_model(net, settings)


class Words(torch.nn.Module):
    """A small language model that compiles quickly and belongs to no library."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        self.head = torch.nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def of_words(_: Any) -> Words:
    torch.manual_seed(0)
    return Words()


def generating() -> list[Any]:
    """Return a callback that generates text after each training step, and adds the text to the log."""
    from transformers import TrainerCallback

    class Generate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            prompt = torch.tensor([[3, 5, 7]])
            tokens = kwargs["model"].generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
            )
            state.log_history.append({"generated": tokens.tolist()})

    return [Generate()]


def with_accelerate(key: dict[str, Any] | None, **options: Any) -> tuple[Any, list[Any]]:
    """Train with Accelerate, and return the final engine and the losses of all steps."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import get_linear_schedule_with_warmup

    config = ds_config(key, bf16={"enabled": True}, **options.pop("config", {}))
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 3, STEPS)
    loader = torch.utils.data.DataLoader(samples(), batch_size=BATCH)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    losses: list[Any] = []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append((loss.item(), schedule.get_last_lr()))
    return net, losses


def with_lightning(key: dict[str, Any] | None, **options: Any) -> tuple[Any, list[Any]]:
    """Train with Lightning, and return the final engine and the losses of all steps."""
    from tests.runtime.frontdoor.lightning_run import fit

    config = ds_config(key, train_micro_batch_size_per_gpu=BATCH, **options.pop("config", {}))
    # Lightning fills in these keys if they are missing, but does not know "auto".
    for name in ("gradient_clipping", "gradient_accumulation_steps", "bf16"):
        del config[name]
    return fit(config, model(), samples(), STEPS)


TRAINERS: dict[str, Callable[..., tuple[Any, list[Any]]]] = {
    "trainer": with_trainer,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}
OTHERS = {"sft": with_sft}


def outcome(
    train: Callable[..., tuple[Any, list[Any]]], key: dict[str, Any] | None, **options: Any
) -> tuple[Outcome, dict[str, Any]]:
    """Train an engine with the function ``train``, and destroy the engine.

    Args:
        key: Value of the config key ``ebbtide``. None means that stock DeepSpeed trains.

    Returns:
        ((state, losses), next key). The next key is a value of the config key ``ebbtide`` for a repetition of the
        training. If ``key`` is None, the next key holds a plan for the engine's subgroups, so that the repetition is
        under a plan. Otherwise the next key is ``key`` itself.
    """
    engine, losses = train(key, **options)
    assert hasattr(engine.optimizer, "_ebbtide") == (key is not None)
    state = state_of(engine) if engine.zero_optimization_stage() == 3 else saved_state(engine)
    fitting = key if key is not None else key_for(engine)
    engine.destroy()
    forget_accelerate()
    return (state, losses), fitting


def saved_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return the model's parameters, and the optimizer state that a checkpoint would save, as a dict from name to
    tensor.

    The optimizer state is read from the optimizer's ``state_dict``, because below ZeRO-3, stock DeepSpeed's
    public functions give only the moments of the first parameter group.
    """
    state = {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            state[name] = value.detach().clone()
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for part, inner in items:
                add(f"{name}/{part}", inner)

    add("optimizer", engine.optimizer.state_dict())
    assert any("exp_avg_sq" in name for name in state), sorted(state)
    return state


def forget_accelerate() -> None:
    """Reset Accelerate's state, which is kept per process, so that the next trainer starts with a new one."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def compare(name: str, **options: Any) -> list[str]:
    """Return the differences between training with stock DeepSpeed and with the key ``ebbtide``, as text.
    Empty if there are none.
    """
    stock, key = outcome((TRAINERS | OTHERS)[name], None, **options)
    ours, _ = outcome((TRAINERS | OTHERS)[name], key, **options)
    different = list(differences(ours[0], stock[0]))
    if not stock[1] or ours[1] != stock[1]:
        different.append(f"losses: {stock[1]} stock, {ours[1]} ours")
    placements = {run["placement"] for run in key["plan"]["ways"]}
    assert options or placements == set(PATTERN), placements
    assert len(stock[0]) > 8, "there must be something to compare"
    return [f"{name}: {what}" for what in different]


def settle_imports() -> None:
    """Prepare this process for building many engines fast.

    Import the trainers, cache the processor's name, and exclude the present objects from garbage collections.
    """
    remember_processor()
    import_module("transformers.trainer")
    import_module("tests.runtime.frontdoor.lightning_run")
    freeze_heap()


def on_rank(rank: int, port: int, folder: Path, names: list[str]) -> None:
    """Compare each trainer as one of two ranks, and write the differences to the file ``rank<N>`` in a folder."""
    os.environ |= variables(rank, port)
    different = [line for name in names for line in compare(name)]
    (folder / f"rank{rank}").write_text("\n".join(different) or "same")
    torch.distributed.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    """Compare the trainers on two ranks, which are forks of this process: the libraries are imported only once."""
    settle_imports()
    ebbtide.runtime.enable()
    port = free_port()
    ranks = [Forked(partial(on_rank, rank, port, folder, names), folder / f"log{rank}") for rank in range(RANKS)]
    try:
        # If a rank fails, the other one waits for it until gloo notices the closed connection.
        assert [rank.ended(LIMIT_S) for rank in ranks] == [0] * RANKS, "\n".join(rank.output for rank in ranks)
    finally:
        remove_shared_buffers(port)


if __name__ == "__main__":
    STEPS = 6  # number of steps. As many ranks run as share a core
    main(Path(sys.argv[1]), sys.argv[2:])
