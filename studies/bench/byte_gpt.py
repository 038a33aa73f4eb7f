"""Workload of the studies: a byte-level GPT trained on the source code of Python's standard library.

The text is real and exists on every machine, so no tokenizer and no download is needed. The data of a step is a
function of the step's number, so a resumed run sees the same data as an uninterrupted run.
"""

import os
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from studies.bench.products import Linear, widened

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets
VOCABULARY = 256  # every byte is a token
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class ByteGPTConfig:
    """The sizes of the byte-level GPT model that the studies train.

    Attributes:
        sequence: Number of bytes of context, which is also the number of bytes predicted per sample.
        checkpoint_activations: True to recompute each block in backward instead of keeping its activations.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 256
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, but got {name}={getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads, but got hidden={self.hidden}, heads={self.heads}")

    @property
    def params(self) -> int:
        """Return the number of parameters of the byte-level GPT with these sizes."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (2 * VOCABULARY + self.sequence + 2) * self.hidden

    def with_sequence(self, sequence: int) -> "ByteGPTConfig":
        return replace(self, sequence=sequence)


# Model sizes by name. The name gives the number of parameters.
SIZES: dict[str, ByteGPTConfig] = {
    "tiny": ByteGPTConfig(layers=2, hidden=64, heads=2, sequence=32),
    "4m": ByteGPTConfig(layers=5, hidden=256, heads=4),
    "40m": ByteGPTConfig(layers=8, hidden=640, heads=10),
    "57m": ByteGPTConfig(layers=8, hidden=768, heads=12),
    "110m": ByteGPTConfig(layers=9, hidden=1008, heads=12),
    "200m": ByteGPTConfig(layers=4, hidden=2048, heads=16),  # its tensors are as large as those of big models
    "350m": ByteGPTConfig(layers=28, hidden=1024, heads=16, sequence=1024),
    "1.3b": ByteGPTConfig(layers=26, hidden=2048, heads=16, sequence=2048),
    "3b": ByteGPTConfig(layers=38, hidden=2560, heads=20, sequence=2048),
    "7b": ByteGPTConfig(layers=34, hidden=4096, heads=32, sequence=2048),
}


class TransformerBlock(nn.Module):
    """A pre-LayerNorm transformer block that maps (batch, sequence, hidden) to the same shape."""

    def __init__(self, config: ByteGPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.qkv = Linear(config.hidden, 3 * config.hidden)
        self.project = Linear(config.hidden, config.hidden)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.widen = Linear(config.hidden, 4 * config.hidden)
        self.narrow = Linear(4 * config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(self._attend(self.norm_attention(x)))
        expanded: torch.Tensor = self.narrow(F.gelu(self.widen(self.norm_mlp(x))))
        return x + expanded

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        # (batch, sequence, 3, heads, width) -> three tensors (batch, heads, sequence, width)
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if widened(x):
            q, k, v = q.float(), k.float(), v.float()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        return mixed.transpose(1, 2).reshape(batch, sequence, hidden)


class ByteGPT(nn.Module):
    """A GPT that predicts the next byte. ``forward(inputs, targets)`` returns the mean cross entropy.

    Args:
        seed: Seed of the initial weights. Torch's global random state is not used. Weights are drawn from N(0, 0.02),
            and residual outputs are scaled by 1/sqrt(2 layers) as in GPT-2. If None, the weights stay uninitialized.
            Use None under ``deepspeed.zero.Init``, which partitions the parameters while modules are built.
    """

    def __init__(self, config: ByteGPTConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.bytes_in = nn.Embedding(VOCABULARY, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = Linear(config.hidden, VOCABULARY, bias=False)
        if seed is not None:
            # Every caller gets the same weights. On a GPU they differ, because its generator is another one.
            self._initialise(torch.Generator(self.norm.weight.device).manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        residual = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:  # biases are 0, norms' weights 1
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            scale = residual if name.endswith(("project.weight", "narrow.weight")) else 1.0
            noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
            parameter.copy_(noise * (0.02 * scale))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.bytes_in(inputs) + self.positions(places)
        for block in self.blocks:
            # Reentrant, because the other kind compares shapes on recomputation, and ZeRO-3 has released the parameters
            # by then.
            if self.config.checkpoint_activations and self.training:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


@cache
def python_sources() -> np.ndarray:
    """Return the .py files of Python's standard library as one uint8 array, joined in the order of their paths.

    Tests and installed packages are left out.

    Raises:
        RuntimeError: If this Python was installed without the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, below, names in os.walk(root):
        below[:] = set(below) - _SKIPPED_FOLDERS  # these folders are not searched
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    text = b"".join(path.read_bytes() for path in files)
    if len(text) < 1_000_000:
        raise RuntimeError(
            "the studies train on the .py files of Python's own library, >= 1 MB of them, but "
            f"found {len(text)} bytes in {root}: use a Python that ships its sources"
        )
    return np.frombuffer(text, dtype=np.uint8)


@dataclass(frozen=True)
class Batches:
    """Training batches of the byte-level GPT, each looked up by the number of its training step.

    A step gets the same bytes in every run, whatever the order in which batches are requested.
    """

    batch: int
    sequence: int
    seed: int = 0
    rank: int = 0

    def at(self, step: int, device: str | torch.device = "cpu") -> Batch:
        """Return the batch of a training step: inputs and targets, each int64 with shape (batch, sequence)."""
        text = python_sources()
        rng = np.random.default_rng([self.seed, self.rank, step])
        starts = rng.integers(0, len(text) - self.sequence - 1, size=self.batch)
        windows = np.stack([text[s : s + self.sequence + 1] for s in starts]).astype(np.int64)
        tokens = torch.from_numpy(windows).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ds_config(
    micro_batch: int = 1,
    subgroup_size: int = 10_000_000,
    *,
    learning_rate: float = 1e-4,
    clipping: float = 1.0,
    accumulation: int = 1,
    precision: str = "bf16",
    offload: bool = True,
    **zero: Any,
) -> dict[str, Any]:
    """Return a DeepSpeed config with ZeRO-3, AdamW, and optimizer state offloaded to pinned host memory.

    Args:
        micro_batch: Number of samples per rank in one forward pass.
        subgroup_size: Value of ``sub_group_size``, in elements.
        precision: Training precision: ``bf16``, ``fp16`` or ``fp32``.
        offload: If False, the optimizer state stays on the GPU.
        zero: Additional keys of ``zero_optimization``, which override the keys set here.
    """
    if precision not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"precision must be bf16, fp16 or fp32, but got {precision!r}")
    stage3: dict[str, Any] = {"stage": 3, "sub_group_size": subgroup_size}
    if offload:
        stage3["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {**stage3, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "steps_per_print": 10**9,  # the studies print their own steps
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def stock_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """Return an engine of stock DeepSpeed, without ebbtide, that trains all parameters of a model."""
    import deepspeed

    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train_step(engine: Any, batch: Batch) -> torch.Tensor:
    """Run forward, backward and the optimizer step of a DeepSpeed engine on one batch, and return the detached loss."""
    loss: torch.Tensor = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()
