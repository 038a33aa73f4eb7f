"""One rank of one configuration, trained for a few steps on random tokens (`verify` starts it)."""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from ebbtide.simulator.estimates.modules import model_class

WARMUP = 3  # steps: the first ones allocate, compile and trace


def main() -> None:
    """Entry point of ``python -m ebbtide.tuner.configurations.trial``; writes rank<N>.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face config.json")
    parser.add_argument("--folder", type=Path, required=True, help="has ds.json, maybe plan.json")
    parser.add_argument("--sequence", type=int, required=True, help="tokens per sample")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps to time")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    args = parser.parse_args()
    engine, vocabulary = _engine(args)
    times = [_step(engine, vocabulary, args.sequence) for _ in range(WARMUP + args.steps)]
    record = {"iteration_s": statistics.median(times[WARMUP:]), "iterations_s": times}
    rank = int(os.environ.get("RANK", "0"))
    (args.folder / f"rank{rank}.json").write_text(json.dumps(record))
    engine.destroy()
    import torch.distributed

    torch.distributed.destroy_process_group()  # else the launcher may call the end a failure


def _engine(args: argparse.Namespace) -> tuple[Any, int]:
    import deepspeed
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.model)
    model = model_class(config).from_config(config)
    if args.recompute:
        model.gradient_checkpointing_enable()
    ds_config = json.loads((args.folder / "ds.json").read_text())
    plan = args.folder / "plan.json"
    if not plan.exists():
        made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    else:
        import ebbtide.runtime

        made = ebbtide.runtime.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config, plan=str(plan)
        )
    return made[0], config.vocab_size


def _step(engine: Any, vocabulary: int, sequence: int) -> float:
    """One optimizer step; its wall time. The device is waited for at its end only."""
    import torch

    begun = time.perf_counter()
    for _ in range(engine.gradient_accumulation_steps()):
        shape = (engine.train_micro_batch_size_per_gpu(), sequence)
        tokens = torch.randint(vocabulary, shape, device=engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
