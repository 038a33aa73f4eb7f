"""Example: training with Lightning's Trainer and its DeepSpeedStrategy, which needs a GPU.

tune run -- python examples/lightning_fit.py examples/ds_lightning.json
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import DeepSpeedStrategy
from tiny_llama import samples, tiny_llama


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.print(f"step {number}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> Any:
        return DeepSpeedCPUAdam(self.parameters(), lr=1e-3)


def main(config: str, steps: int) -> None:
    trainer = pl.Trainer(
        strategy=DeepSpeedStrategy(config=config),
        precision="bf16-mixed",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
        default_root_dir="runs/lightning_fit",
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(samples(), batch_size=4))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
