"""Example: training with Hugging Face's Trainer and DeepSpeed.

tune run -- python examples/hf_trainer.py examples/ds_trainer.json
"""

from __future__ import annotations

import sys

import torch
from tiny_llama import samples, tiny_llama
from transformers import Trainer, TrainingArguments


def main(config: str, steps: int) -> None:
    # Created before the model, so that the model's parameters are partitioned while it is built.
    arguments = TrainingArguments(
        output_dir="runs/hf_trainer",
        deepspeed=config,
        max_steps=steps,
        bf16=True,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    Trainer(model=tiny_llama(), args=arguments, train_dataset=samples()).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
