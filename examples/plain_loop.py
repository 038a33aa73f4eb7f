"""Example: a hand-written training loop around a DeepSpeed engine.

tune run -- python examples/plain_loop.py examples/ds_plain.json
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import nn


def main(config: str, steps: int) -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(steps):
        tokens = torch.randint(0, 256, (4, 33), device=engine.device)
        logits = engine(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
