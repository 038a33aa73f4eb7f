"""The first line of every answer: the model, its parameters, the machine, and the source of the machine's rates."""

from ebbtide.simulator.machine import Machine
from ebbtide.simulator.workload import Workload


def about(workload: Workload, machine: Machine) -> str:
    """Return a line that names the model and the machine of a training job.

    >>> about(workload, machine)
    'Llama 3 8B, 8.03 B parameters, on 1 x NVIDIA GeForce RTX 4090 (preset rtx4090, rates from data sheets)'
    """
    job, ranks = workload.job, workload.ranks_per_node * workload.nodes
    params = sum(block.elements for block in job.architecture.blocks()) if job else workload.params * ranks
    return about_model(workload.name, params, machine, ranks)


def about_model(name: str, params: int, machine: Machine, gpus: int = 0) -> str:
    """Return the same as `about`, from the model's name and its number of parameters.

    Args:
        gpus: Number of GPUs of the job. 0: it is what the answer is about.
    """
    size = f"{params / 1e9:.3g} B" if params >= 1e8 else f"{params / 1e6:.3g} M"
    fitted = any(getattr(value, "source", "") == "fitted" for _, value in machine)
    rates = "rates fitted to runs" if fitted else "rates from data sheets" if machine.is_preset else "rates measured"
    known = f"preset {machine.name}" if machine.is_preset else machine.name
    return f"{name}, {size} parameters, on {_cards(machine, gpus)} ({known}, {rates})"


def _cards(machine: Machine, gpus: int) -> str:
    card, there = machine.device_name or machine.name, machine.gpus_per_node
    if machine.unified_memory or machine.device_kind == "emulated":
        return f"{gpus} x {card}" if gpus > 1 else card
    if not gpus:
        return f"{there} x {card}"
    if gpus > there:
        return f"{gpus} x {card} in {-(-gpus // there)} machines"
    return f"{gpus} of {there} x {card}" if gpus < there else f"{gpus} x {card}"
