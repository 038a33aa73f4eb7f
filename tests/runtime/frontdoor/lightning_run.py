"""Training with Lightning's DeepSpeedStrategy on a machine without a GPU, for stock DeepSpeed and ebbtide."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class OnTheCpu(DeepSpeedStrategy):
    """A DeepSpeedStrategy that does not require CUDA devices. Only Lightning requires them, not DeepSpeed."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        return [torch.device("cpu", n) for n in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        pass

    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()


class Module(pl.LightningModule):
    """A Lightning module of a causal language model. It records its losses."""

    def __init__(self, net: torch.nn.Module, steps: int) -> None:
        super().__init__()
        self.net, self.steps, self.losses = net, steps, []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.net(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(config: dict[str, Any], net: torch.nn.Module, samples: list[Any], steps: int) -> tuple[Any, list[float]]:
    """Train with Lightning, and return the final engine and the losses of all steps."""
    module = Module(net, steps)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=OnTheCpu(config=config),
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
        accumulate_grad_batches=1,
        default_root_dir=tempfile.mkdtemp(),
    )
    held = {}

    class Keep(pl.Callback):
        def on_train_end(self, trainer: Any, _: Any) -> None:
            held["engine"] = trainer.strategy.model

    trainer.callbacks.append(Keep())
    loader = torch.utils.data.DataLoader(samples, batch_size=config["train_micro_batch_size_per_gpu"])
    trainer.fit(module, loader)
    return held["engine"], module.losses
