"""Example: fine-tuning with TRL's SFTTrainer on samples that are already tokenized.

tune run -- python examples/trl_sft.py examples/ds_trainer.json
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from tiny_llama import samples, tiny_llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, 256)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main(config: str, steps: int) -> None:
    arguments = SFTConfig(
        output_dir="runs/trl_sft",
        deepspeed=config,
        max_steps=steps,
        bf16=True,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        max_length=64,
    )
    rows = [{"input_ids": sample["input_ids"].tolist()} for sample in samples()]
    SFTTrainer(
        model=tiny_llama(), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
