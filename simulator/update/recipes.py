"""Recipes: the sequences of ops for a subgroup's gradient and update, for each placement of optimizer state.

A recipe tells the lane of each op (a queue such as a copy direction), its amount of work, and what it waits for. The
builder of schedules, the compiled simulator, the computation of memory and the runtime's executor all use the recipes
of `RECIPES`. So a simulated update and a real update have the same ops. The lower bound of an iteration's time is
computed from the same ops and from `Bytes`, the bytes per parameter that ops move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ebbtide.simulator.schedule import Lane, Memory, OpKind
from ebbtide.simulator.update.steps import (
    HOST_SLOTS,
    PARAMETER_SLOTS,
    Bytes,
    Placement,
    Queue,
    Slot,
    Step,
    Wait,
    adam_passes,
    into,
    out_of,
)


@dataclass(frozen=True)
class Recipe:
    """The sequence of ops for the gradient and the update of a subgroup with a given placement.

    Attributes:
        steps: Ops of the update, in order.
        state, gradient: Memory that holds the optimizer state, and memory from which the update reads the gradient.
        gradient_steps: Ops that each micro-batch's gradient needs after its reduction over the ranks, such as a copy to
            the host. Empty if it needs none. A step's gradient is complete when the last micro-batch's reduction and
            these ops have ended.
    """

    queue: Queue
    state: Memory
    gradient: Memory
    steps: tuple[Step, ...]
    gradient_steps: tuple[Step, ...] = ()

    @cached_property
    def slots(self) -> frozenset[Slot]:
        """Return the kinds of buffers (such as staging buffers in GPU memory) that the update of a subgroup uses."""
        return frozenset(step.takes for step in self.steps if step.takes is not None)

    @cached_property
    def parameters_on_host(self) -> Recipe:
        """Return this recipe (sequence of ops of an update), changed for parameters in host memory.

        An update on the CPU writes these parameters in place. After an update on the GPU they are copied to the host
        before the state, because the next forward waits for them.
        """
        steps: list[Step] = []
        for step in self.steps:
            if step.kind == OpKind.UPDATE_HOST:
                steps.append(replace(step, takes=None, publishes=True))
            elif step.kind == OpKind.UPDATE_DEVICE:
                steps += [replace(step, takes=Slot.OUTGOING, publishes=False), _PARAMETERS_OUT]
            elif step.kind != OpKind.PARAMETER_H2D:
                steps.append(step)
        return replace(self, steps=tuple(steps))

    @cached_property
    def updated_early(self) -> Recipe | None:
        """Return the recipe of an early update.

        The result is None if the placement does not allow such an early update. The update starts when the gradient is
        complete, and assumes that the step neither clips nor overflows. It writes to other buffers than it reads, so
        that it can be dropped if the step clips or overflows. New parameters stay in a buffer of their own until the
        gradient norm is known.
        """
        update, *rest = self.steps
        if update.takes == Slot.STAGING and rest[0].publishes:
            return replace(self, steps=_early_staged_update(update, *rest))
        if update.kind != OpKind.UPDATE_HOST or not (update.overwrites and rest):
            return None
        # The same number of bytes as in place, because non-temporal stores do not read the cache lines first.
        early = replace(
            update,
            kind=OpKind.UPDATE_HOST_EARLY,
            rate="host_adam_out_of_place_params_per_s",
            waits=update.waits & ~Wait.NORM,
            takes=None,
        )
        after, *others = rest
        return replace(self, steps=(early, _behind_the_norm(after), *others))

    @cached_property
    def summed_on_device(self) -> Recipe | None:
        """Return this recipe, changed for gradients that are accumulated on the GPU.

        In the changed recipe, the sum of all micro-batches' gradients is copied to the host once, after the last micro-
        batch. The result is None if this recipe copies no gradients to the host.
        """
        sent = [step for step in self.gradient_steps if Wait.SUM not in step.waits]
        if len(sent) == len(self.gradient_steps):
            return None
        once = tuple(replace(step, waits=step.waits | Wait.LAST) for step in sent)
        return replace(self, gradient_steps=once)

    @cached_property
    def before_norm(self) -> int:
        """Return the number of ops at the start of a subgroup's update that do not wait for the gradient norm."""
        return next(i for i, step in enumerate(self.steps) if Wait.NORM in step.waits)


def _host_update(waits: Wait) -> Step:
    # The kernel writes the new parameters into a slot, so the last copy from this slot must have ended.
    return Step(
        OpKind.UPDATE_HOST,
        Lane.HOST,
        "host_adam_params_per_s",
        adam_passes,
        Wait.NORM | Wait.GRADIENT | waits,
        lambda b: b.host_traffic,
        takes=Slot.PARAMETER,
        threads=True,
    )


def _device_update(waits: Wait) -> Step:
    return Step(
        OpKind.UPDATE_DEVICE,
        Lane.DEVICE_UPDATE,
        "device_adam_params_per_s",
        adam_passes,
        Wait.NORM | Wait.GRADIENT | waits,
        device_share=1.0,
        publishes=True,
    )


# New parameters are copied to the GPU on a lane of their own. Otherwise the state of a staged update would queue behind
# a parameter that waits for a CPU update.
_PARAMETERS_TO_DEVICE = into(
    "device",
    OpKind.PARAMETER_H2D,
    lambda b: b.wire,
    Wait.PREVIOUS,
    Lane.H2D_PARAMETERS,
    gives_back=Slot.PARAMETER,
    publishes=True,
)
_PARAMETERS_OUT = out_of(
    "device", OpKind.PARAMETER_D2H, lambda b: b.wire, Wait.PREVIOUS, gives_back=Slot.OUTGOING, publishes=True
)


def _behind_the_norm(publish: Step) -> Step:
    return replace(publish, waits=publish.waits | Wait.NORM, gives_back=None)


def _early_staged_update(come: Step, update: Step, leave: Step) -> tuple[Step, ...]:
    def leaving(b: Bytes) -> float:
        return b.state + b.wire

    return (
        replace(come, waits=come.waits & ~Wait.NORM),
        replace(update, kind=OpKind.UPDATE_DEVICE_EARLY, waits=update.waits & ~Wait.NORM, publishes=False),
        replace(leave, work=leaving, dram=leaving),
        _behind_the_norm(_PARAMETERS_TO_DEVICE),
    )


# A gradient that goes to host memory. From the second micro-batch on, the earlier sum is first copied to the GPU,
# because micro-batches are added on the GPU, as in DeepSpeed.
GRADIENT_TO_HOST = (
    into("device", OpKind.GRADIENT_H2D, lambda b: b.gradient, Wait.PREVIOUS | Wait.SUM, Lane.H2D_GRADIENTS),
    out_of("device", OpKind.GRADIENT_D2H, lambda b: b.gradient, Wait.PREVIOUS, Lane.D2H_GRADIENTS),
)
# Recipes for parameters that live on the GPU. `recipe_of` also returns those for parameters in host memory.
RECIPES: Mapping[Placement, Recipe] = {
    "host": Recipe(
        Queue.HOST,
        state="host",
        gradient="host",
        gradient_steps=GRADIENT_TO_HOST,
        steps=(_host_update(Wait.GATE), _PARAMETERS_TO_DEVICE),
    ),
    "device": Recipe(
        Queue.DEVICE,
        state="host",
        gradient="device",
        steps=(
            # The previous state in this slot must be back on the host before the slot is overwritten. There are never
            # more slots than staged updates, so the write-back of a subgroup always precedes its next copy to the GPU.
            into("device", OpKind.STATE_H2D, lambda b: b.state, Wait.NORM, takes=Slot.STAGING, early=True),
            _device_update(Wait.PREVIOUS),
            out_of("device", OpKind.STATE_D2H, lambda b: b.state, Wait.PREVIOUS | Wait.GATE, gives_back=Slot.STAGING),
        ),
    ),
    "resident": Recipe(Queue.DEVICE, state="device", gradient="device", steps=(_device_update(Wait.GATE),)),
    "stored": Recipe(
        Queue.HOST,
        state="storage",
        gradient="host",
        gradient_steps=GRADIENT_TO_HOST,
        steps=(
            out_of("storage", OpKind.STATE_READ, lambda b: b.state, Wait.NORM, takes=Slot.STATE, early=True),
            _host_update(Wait.PREVIOUS),
            _PARAMETERS_TO_DEVICE,
            # The update writes to another place. From its end on, readers of the state see the new state.
            into("storage", OpKind.STATE_WRITE, lambda b: b.state, Wait.PREVIOUS | Wait.GATE, gives_back=Slot.STATE),
        ),
    ),
}


def recipe_of(placement: Placement, location: Memory, *, updated_early: bool = False, summed: bool = False) -> Recipe:
    """Return the recipe of a subgroup's update, for a placement and a parameter location."""
    recipe = RECIPES[placement] if location == "device" else RECIPES[placement].parameters_on_host
    recipe = (recipe.updated_early or recipe) if updated_early else recipe
    return (recipe.summed_on_device or recipe) if summed else recipe


def slot_limits(staging_slots: int, recipes: Iterable[Recipe], host_slots: int = HOST_SLOTS) -> dict[Slot, int]:
    """Return a dict from each kind of buffer to the number of buffers that the updates under a plan use."""
    # There are never more buffers of a kind than subgroups that use this kind.
    users = Counter(slot for recipe in recipes for slot in recipe.slots)
    return {slot: slot_limit(slot, staging_slots, users[slot], host_slots) for slot in Slot}


def slot_limit(slot: Slot, staging_slots: int, users: int, host_slots: int = HOST_SLOTS) -> int:
    """Return the number of buffers of the given kind under a plan: at most ``users``, the number of subgroups that
    use them.
    """
    planned = {Slot.STAGING: staging_slots, Slot.STATE: host_slots}
    return min(planned.get(slot, PARAMETER_SLOTS), users)


def early_limits(prefetch: int, slots: Mapping[Slot, int]) -> dict[Slot, int]:
    """Return how many buffers of each kind may be filled with state before the gradient norm is known, as a dict."""
    # Buffers of early updates are not counted. The plan's ``prefetch`` limits staging buffers, because activations
    # still take GPU memory at that time.
    return {Slot.STAGING: prefetch, Slot.STATE: slots[Slot.STATE]}
