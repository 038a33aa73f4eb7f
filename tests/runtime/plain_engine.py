"""A training engine of plain torch under a plan, without DeepSpeed. It implements `TrainingEngine`.

It has one rank, bf16 parameters and fp32 masters. Gradients are summed in bf16 and clipped to a
norm. The update is torch's own AdamW, on the host and on the emulated device.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from ebbtide.runtime.checkpoint.files import Files
from ebbtide.runtime.checkpoint.format.memory import Slots
from ebbtide.runtime.checkpoint.format.safe_load import load_file
from ebbtide.runtime.checkpoint.format.skeleton import PlannedFile, lay_out
from ebbtide.runtime.checkpoint.live_state import LiveState
from ebbtide.runtime.checkpoint.protocol.commit import Attempt, Commit
from ebbtide.runtime.checkpoint.stream.job import BackgroundSave
from ebbtide.runtime.checkpoint.stream.persist import BlockWriter, Pace
from ebbtide.runtime.devices.base import Device
from ebbtide.runtime.devices.choice import EmulatedDevice
from ebbtide.runtime.execution.gradients import GradientBuffers, ParameterSlice
from ebbtide.runtime.execution.session import Session
from ebbtide.runtime.execution.subgroup_state import Buffers
from ebbtide.runtime.kernels.rule import UpdateRule
from ebbtide.simulator.plan import READY_BLOCKS, CheckpointPlan
from torch.optim.adamw import adamw

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class TorchStep:
    """One AdamW step as torch runs it on one tensor. ``number`` counts the steps from 1."""

    kernel: ClassVar[str] = "torch"
    number: int
    variant: int = 0

    def scalars(self, scale):
        return np.array([scale, self.number], dtype=np.float32)

    def apply(self, state, parts, out):
        master, first, second = state
        gradient = torch.empty_like(master)
        for start, end, part, scale in parts:
            gradient[start:end].copy_(part).mul_(scale)
        beta1, beta2 = ADAMW["betas"]
        adamw(
            [master],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(self.number - 1.0)],
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=ADAMW["lr"],
            weight_decay=ADAMW["weight_decay"],
            eps=ADAMW["eps"],
        )
        out.copy_(master)


class TorchAdamW(UpdateRule):
    name, moments, stock, types, trials = "torch", ("exp_avg", "exp_avg_sq"), "", (), ()

    def update(self, state, parts, out, step, threads, source=None):
        for to, old in zip(state, source or (), strict=False):
            to.copy_(old)
        step.apply(state, parts, out)

    def step(self, group, number):
        return TorchStep(number)


class _TorchKernel:
    def update(self, state, grad, out, step, scale, tail, stream):
        step.apply(state, [(0, grad.numel(), grad, scale)], out)


class UnifiedTorch(_TorchKernel, Device):
    """A device for the plain-torch engine that shares the host's memory and runs torch's AdamW."""


class EmulatedTorch(_TorchKernel, EmulatedDevice):
    """An emulated device for the plain-torch engine, with separate memory and real copies, which runs torch's AdamW."""


def cut(params, size):
    """Return groups of whole parameters in order, as an engine's subgroups. Each has up to ``size`` elements
    and at least one parameter.
    """
    groups = [[]]
    for param in params:
        if groups[-1] and sum(p.numel() for p in groups[-1]) + param.numel() > size:
            groups.append([])
        groups[-1].append(param)
    return groups


class PlainEngine:
    """An implementation of `ebbtide.runtime.execution.engine.TrainingEngine` for a module of bf16 parameters."""

    shares_state = False
    overlaps_forward = True

    def __init__(self, model, plan, device, *, clip: float | None = None, accumulation: int = 1):
        self.model, self.clip, self.accumulation = model, clip, accumulation
        self.groups = cut(list(model.parameters()), plan.subgroup_size)
        self.steps = self.micro = 0
        self.norms: dict[int, torch.Tensor] = {}
        self.rule, self.live = TorchAdamW(), LiveState()
        self.sent = {id(p): i for i, group in enumerate(self.groups) for p in group}
        self.session = Session(self, plan, device)
        self.live.register_all({i: self.saved_state(i) for i in range(len(self.groups))})
        self.session.executor.bodies.gate = self.live
        self.gate_reads(self._await)
        for number, param in enumerate(model.parameters()):
            param.register_post_accumulate_grad_hook(lambda p, n=number: self._arrived(p, n))

    def _await(self, params: Any) -> None:
        self.session.executor.wait_parameters({self.sent[id(p)] for p in params})

    def _arrived(self, param, number):
        piece = self.session.gradient_buffers.slices[number]
        boundary = self.micro == self.accumulation - 1
        total = self.session.gradient_buffers.accept(
            piece, param.grad.flatten(), first=self.micro == 0, boundary=boundary
        )
        if boundary:
            self.norms[number] = torch.linalg.vector_norm(total.float())
        param.grad = None

    def backward(self, loss):
        if self.micro == self.accumulation - 1:
            self.session.prefetch()
        loss.backward()
        self.micro += 1

    def close_window(self):
        self.session.gradient_buffers.close_window()

    def step(self):
        self.session.begin_step()
        self.close_window()
        norm = torch.linalg.vector_norm(torch.stack([self.norms[n] for n in sorted(self.norms)]))
        limit = float("inf") if self.clip is None else self.clip
        self.session.update(min(1.0, float(limit / (norm + 1e-6))))
        if not self.session.plan.overlap_forward:
            self.session.executor.wait_all()
        self.session.recorder.step_ends()
        self.micro = 0
        self.session.stepped()

    def save(self, folder: Path, tag: str, bytes_per_s: float | None = None) -> BackgroundSave:
        """Save a checkpoint while training continues. The returned job tells when it is committed."""
        self.publish()
        attempt = Attempt(folder, tag, uuid.uuid4().hex, self.steps, rank=0, world_size=1)
        state = [self.saved_state(i) for i in range(len(self.groups))]
        layout = lay_out({"steps": self.steps, "state": state}, self.live, stream_device=True)
        files, plan = Files(), CheckpointPlan()
        commit = Commit(attempt, files, plan.deadline_s)
        commit.begin()
        writer = BlockWriter(
            attempt.staging,
            [PlannedFile(Path("state.pt"), layout)],
            files,
            Slots(2, BLOCK_BYTES),
            Slots(plan.writers + READY_BLOCKS, BLOCK_BYTES),
            Pace(bytes_per_s),
            writers=plan.writers,
            progress_deadline_s=plan.deadline_s,
            turns=self.live.turns,
        )
        job = BackgroundSave(attempt, commit, writer, self.live, files, keep=0)
        job.start()
        return job

    def load(self, checkpoint: Path) -> None:
        self.publish()
        page = load_file(checkpoint / "state.pt")
        self.steps = page["steps"]
        for state, saved in zip(self.session.executor.states, page["state"], strict=True):
            for to, source in zip(state.state, saved, strict=True):
                to.copy_(source)
            state.wire.copy_(state.p)
        self.session.executor.state_written(range(len(self.groups)))

    # Methods that the session calls.

    def sizes(self):
        return tuple(sum(p.numel() for p in group) for group in self.groups)

    def wire_dtype(self):
        return "bf16"

    def parameter_location(self):
        return "device"

    def zero_stage(self):
        return 3

    def first_use(self):
        return list(range(len(self.groups)))

    def update_rule(self):
        return self.rule

    def slices(self):
        pieces = {}
        for subgroup, group in enumerate(self.groups):
            offset = 0
            for param in group:
                pieces[len(pieces)] = ParameterSlice(subgroup, offset, param.numel(), real=True)
                offset += param.numel()
        return pieces

    def gradient_buffers(self, device, states, ops, complete):
        return GradientBuffers(device, states, self.slices(), ops, complete)

    def prepare(self, device):
        """Do nothing, because this engine has no flat buffers to prepare."""

    def take(self, subgroup, now):
        if now is not None:
            return Buffers(now.state, now.gradient, now.wire, now.parameter_location)
        wire = torch.cat([p.detach().flatten() for p in self.groups[subgroup]])
        master = wire.float()
        state = (master, torch.zeros_like(master), torch.zeros_like(master))
        return Buffers(state, torch.zeros_like(wire), wire)

    def adopt(self, state):
        offset = 0
        for param in self.groups[state.index]:
            param.data = state.wire[offset : offset + param.numel()].view_as(param)
            offset += param.numel()

    def settle(self):
        """Do nothing, because this engine leaves nothing to finalize."""

    def hyperparameters(self):
        self.steps += 1
        return [self.rule.step({}, self.steps)] * len(self.groups)

    def expected_step(self):
        return [self.rule.step({}, self.steps + 1)] * len(self.groups), 1.0

    def unclipped_scale(self):
        return 1.0

    def early_updates_allowed(self):
        return True

    def publish(self):
        self.session.executor.wait_all()

    def saved_state(self, subgroup):
        return self.session.executor.states[subgroup].state

    def gradient_bytes(self):
        return 2

    def bucket_params(self):
        return 0

    def micro_batches(self):
        return self.accumulation

    def recomputes(self):
        return None

    def clips(self):
        return self.clip is not None

    def gathers(self):
        """Return None, because this engine never partitions parameters and so never gathers them."""

    def gate_reads(self, wait):
        hooks = [
            module.register_forward_pre_hook(lambda m, _: wait(list(m.parameters(recurse=False))))
            for module in self.model.modules()
        ]
        return lambda: [hook.remove() for hook in hooks]

    def any_rank(self, flag):
        return flag
