"""Presets: machines with rates from data sheets and published figures, with a source for each value.

They are meant for what-if questions. For training, use a measured machine (`tune profile`), or correct a
preset with runs of your own (`tune calibrate`). No value was fitted to published iteration times.
"""

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ebbtide.simulator.estimates.cards import CARDS, Card
from ebbtide.simulator.estimates.collectives import EFFICIENCY, LINK, PAIR, PCIE_EFFICIENCY
from ebbtide.simulator.estimates.sheets import DOS, SHEETS, Sheet
from ebbtide.simulator.limits import GIB
from ebbtide.simulator.machine import BUILDERS, DEVICE_UPDATE_BYTES, EXPERTS_OF_PRODUCTS, PRESET, Machine, ShareName
from ebbtide.simulator.quantity import EIGHTY_PERCENT, QUARTILE, Quantity, Source
from ebbtide.simulator.rules import RuleError, checked, spelled
from ebbtide.simulator.schedules.stock import FRESH_PASSES

# Quartiles divided by the median, by the source of a value: a single published run is less certain than several, and
# the value of a data sheet is an upper limit. `python -m studies.published_runs` checks the resulting intervals.
_SPREAD: dict[Source, tuple[float, float]] = {
    "published": (0.96, 1.04),
    "datasheet": (0.9, 1.0),
    "assumed": (0.86, 1.14),
}
# Quartiles divided by the median for the shares of the peak that products and attention reach. Chosen so that intervals
# contain nine of ten published runs that no share was fitted to (`python -m studies.published_runs`).
_COMPUTE = (0.9, 1.1)
_EXPERTS = 0.75, 1.33  # the same for the products of experts: a factor of 2 in nine of ten runs
# DRAM traffic of an update, in bytes per parameter. DeepSpeed makes three passes: unscaling reads and writes the fp32
# gradient (8), Adam reads four values and writes three (28), and the conversion to 16 bits reads 4, and writes 2 after
# reading the cache line that it writes to (8 in all). ebbtide's fused pass reads and writes three values, reads the
# 16-bit gradient and writes the 16-bit parameter (28).
STOCK_UPDATE_BYTES, FUSED_UPDATE_BYTES = 44, 28
_WIRE_BYTES = 2
_HBM = 0.8  # share of the data sheet's GPU memory bandwidth that kernels reach
# An unpinned copy passes through one core and then the link (one core copies 17 GB/s on the machine of the tests): 10
# GB/s over PCIe 4. The source of the published runs says "a few GB/s", and DeepSpeed's pull request 5301 a fourth to a
# sixth of the rate of pinned copies.
_PAGEABLE = 10e9
# Slowdown of copies into fresh unpinned memory on two sockets, if ranks are not bound to cores: the core, the staging
# buffer and the pages of some ranks are on different sockets, and all ranks wait for the slowest one. The effect of
# binding was a factor of 1.16 to 1.29.
_UNBOUND = 1.25
# DRAM bandwidth that one core reaches: its outstanding cache lines divided by their latency, however fast the channels
# are. No published run gives it, so presets have the value of the kind of core (server or desktop), which may be a
# third off either way. One thread of DeepSpeed's Adam reaches the bandwidth of one thread of a triad (41 to 47 and 37
# to 44 GB/s, measured on Zen 5).
_CORE_SPREAD = 0.75, 1.33
# Quartiles divided by the median for rings over PCIe: a factor of 2 in nine of ten machines where GPUs have peer
# access, and of 2.5 where data passes through host memory.
_PEER_RINGS, _HOST_RINGS = (0.75, 1.33), (0.69, 1.46)
# Share of the rate of pinned copies that all-gathers and reduce-scatters reach if data passes through host memory, by
# the largest number of GPUs. Each hop is written to DRAM and read again, all hops share DRAM, and on two sockets some
# of them cross the sockets. A pair reached 5.7 of 12 GB/s (two RTX 2080 Ti, nccl-tests). Eight cards on two sockets
# trained as if all-gathers had 3.7 to 6 GB/s of 25, and reductions 1.3 to 6. Four cards are assumed to lie between.
_THROUGH_HOST = {2: (0.45, 0.45), 4: (0.4, 0.3), 8: (0.18, 0.1)}
_LAYER_ISSUE_S = 3.5e-3  # DeepSpeed's hooks take 2.0 to 2.7 ms (measured), plus six gathers per layer
_CONTEXT_BYTES, _NCCL_BYTES = 600 * 2**20, 400 * 2**20
_QUARTILE_OF_EIGHTY_PERCENT = round(QUARTILE / EIGHTY_PERCENT, 3)
# A card's own name -> its preset. Of several presets with a card, the one that is named after the card alone is taken.
_BY_CARD = {
    **{
        sheet.device_name: name
        for name, sheet in reversed(list(SHEETS.items()))
        if not re.search(r"-(node|x\d+)$", name)
    },
    "H100 SXM": "h100",
    "H100 SXM5": "h100",
    "A100 SXM4 40GB": "a100-40gb",
    "A100 SXM4 80GB": "a100-80gb",
    "A100 PCIe 80GB": "a100-pcie",
    "H200 SXM": "h200",
    "GH200 480GB": "gh200",
    "RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
    "RTX PRO 6000 Blackwell Server Edition": "rtxpro6000",
}


@checked
def preset(
    name: str,
    *,
    gpu_memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    flops: float | None = None,
    gpu_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> Machine:
    """Return a machine from data sheets and published figures, by the name of its preset or of its card.

    A card without a preset is described by its data sheet, in the machine of a similar card:

    >>> round(preset("h200").device_memory_bytes / 2**30, 1)
    139.8
    >>> preset("rtx4090", gpu_memory_bytes=11.7 * 2**30, flops=58e12, gpu_bytes_per_s=504e9).name
    'rtx4090'

    Args:
        gpu_memory_bytes: GPU memory that programs can use.
        host_memory_bytes: Host memory of the machine.
        flops: Dense 16-bit flop/s of the card's data sheet. Matrix products and attention reach the same share of it as
            on the preset's card.
        gpu_bytes_per_s: Bandwidth of GPU memory by the data sheet.
        link_bytes_per_s: Rate of copies between pinned host memory and the card, in each direction.

    Raises:
        ValueError: There is no such preset. The message lists all presets, or says how to describe the card.
    """
    name = preset_name(name)
    sheet = SHEETS[name]
    described = {"flops": flops, "hbm_bytes_per_s": gpu_bytes_per_s, "link": link_bytes_per_s}
    changes: dict[str, Any] = {field: value for field, value in described.items() if value is not None}
    if changes:
        _check_positive(flops=flops, gpu_bytes_per_s=gpu_bytes_per_s, link_bytes_per_s=link_bytes_per_s)
        changes["device_name"] = f"{sheet.device_name}, changed as described"
    if link_bytes_per_s is not None:
        changes["link"] = (link_bytes_per_s, "assumed", "as described")
        changes["link_raw_bytes_per_s"] = max(link_bytes_per_s, sheet.link_raw_bytes_per_s)
    made = _of_sheet(name, replace(sheet, **changes))
    sizes = {"device_memory_bytes": gpu_memory_bytes, "host_memory_bytes": host_memory_bytes}
    given = {field: size for field, size in sizes.items() if size is not None}
    return made.with_rates(**given) if given else made


def _check_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise RuleError(f"{name} must be finite and greater than 0, but got {value!r}", key=name)


def _of_sheet(name: str, sheet: Sheet) -> Machine:
    return Machine(
        name=name,
        device_kind="cuda",
        device_name=sheet.device_name,
        gpus_per_node=sheet.gpus,
        cpu_cores=sheet.cores,
        numa_nodes=sheet.numa_nodes,
        host_memory_bytes=sheet.host_gib * GIB,
        device_memory_bytes=int(sheet.device_gib * GIB),
        device_reserved_bytes=_CONTEXT_BYTES + (_NCCL_BYTES if sheet.gpus > 1 else 0),
        **_link_rates(sheet),
        **_device_rates(sheet),
        **_host_rates(sheet),
        rank_shares=_rank_shares(sheet),
        storage_write_bytes_per_s=_value(*sheet.storage),
        network_bytes_per_s=_value(*sheet.network) if sheet.network else None,
        layer_issue_s=_value(
            _LAYER_ISSUE_S,
            "assumed",
            "DeepSpeed's ZeRO-3 hooks of one transformer layer, measured on "
            "another CPU, with the launches of its gathers",
        ),
        **_collectives(sheet),
        other_rates=_wires(sheet),
        measured_with=PRESET,
    )


def preset_name(given: str, more: Iterable[str] = (), what: str = "machine preset") -> str:
    """Return the name of the preset that a user means, which may be given as the card's own name: "RTX A6000".

    Args:
        more: Names that count as known too, such as those of the machines that were uploaded to the service.

    Raises:
        RuleError: There is no such preset. For a card of `CARDS`, the error says how to describe it.
    """
    try:
        return spelled(given, (*preset_names(), *more), what, key="machine", also=_BY_CARD)
    except RuleError as error:
        card = card_named(given)
        refusal = error if card is None else RuleError(f"There is no {what} {given!r}. {card.advice}", key="machine")
        raise refusal from None


def card_named(given: str) -> Card | None:
    """Return the figures of a GPU that has no preset, by its name in any spelling. None if it is not known."""
    with suppress(RuleError):
        return CARDS[spelled(given, CARDS, "card")]
    return None


def sheet_limits(device_name: str) -> dict[str, float]:
    """Return upper limits of a machine's rates, from the data sheet of the machine's GPU.

    Returns:
        A dict from field names of `Machine` to rates. Empty if there is no data sheet of this GPU.
    """
    for sheet in SHEETS.values():
        if sheet.device_name == device_name:
            link = sheet.link_raw_bytes_per_s
            return {"h2d_bytes_per_s": link, "d2h_bytes_per_s": link, "device_flops_per_s": sheet.flops}
    return {}


def preset_names() -> tuple[str, ...]:
    """Return the names of all machine presets in alphabetical order."""
    return tuple(sorted(SHEETS))


def _value(median: float, source: Source, detail: str, spread: tuple[float, float] | None = None) -> Quantity:
    low, high = spread or _SPREAD[source]
    return Quantity(median=median, q1=low * median, q3=high * median, n=1, source=source, detail=detail)


def _link_rates(sheet: Sheet) -> dict[str, Quantity]:
    detail = "one core's copy through the driver's staging buffer: a few GB/s"
    rate, source, detail, spread = sheet.pageable or (_PAGEABLE, "assumed", detail, _SPREAD["assumed"])
    pageable = min(rate, sheet.link[0])
    out = pageable / (_UNBOUND if sheet.numa_nodes > 1 else 1)
    return {
        "h2d_bytes_per_s": _value(*sheet.link),
        "d2h_bytes_per_s": _value(*sheet.link),
        "pageable_h2d_bytes_per_s": _value(pageable, source, detail, spread),
        "pageable_d2h_bytes_per_s": _value(out, source, detail, spread),
    }


def _device_rates(sheet: Sheet) -> dict[str, Quantity]:
    hbm, device, compute = sheet.hbm_bytes_per_s, sheet.device_name, sheet.compute
    rated = f"{device}'s {sheet.flops / 1e12:g} dense bf16 Tflop/s"
    return {
        "device_flops_per_s": _value(
            compute.products * sheet.flops, "assumed", f"{compute.products:.0%} of {rated}: {compute.runs}", _COMPUTE
        ),
        "attention_flops_per_s": _value(
            compute.attention * sheet.flops,
            "assumed",
            f"{compute.attention:.0%} of {rated}: {compute.attention_source}",
            _COMPUTE,
        ),
        "expert_flops_per_s": _value(
            EXPERTS_OF_PRODUCTS * compute.products * sheet.flops,
            "assumed",
            f"{EXPERTS_OF_PRODUCTS:.0%} of the matrix products': OLMoE, arXiv 2409.02060, on no other run",
            _EXPERTS,
        ),
        "device_memory_bytes_per_s": _value(_HBM * hbm, "datasheet", f"{_HBM:.0%} of {device}'s {hbm / 1e12:g} TB/s"),
        "device_adam_params_per_s": _value(
            _HBM * hbm / DEVICE_UPDATE_BYTES,
            "datasheet",
            f"{_HBM:.0%} of {device}'s {hbm / 1e12:g} TB/s at {DEVICE_UPDATE_BYTES} bytes per parameter",
        ),
    }


def _host_rates(sheet: Sheet) -> dict[str, Quantity]:
    # ebbtide's fused update kernel is assumed to reach the same memory bandwidth (bytes per second) as DeepSpeed's
    # update, which makes several passes over memory.
    drawn = _drawn_bytes_per_s(sheet)
    return {
        "dram_bytes_per_s": _value(
            sheet.triad_bytes_per_s,
            "datasheet",
            f"{sheet.triad_bytes_per_s / sheet.dram_bytes_per_s:.0%} of {sheet.dram_detail}",
        ),
        "stock_host_adam_params_per_s": drawn.scaled(1 / STOCK_UPDATE_BYTES),
        "stock_host_adam_thread_params_per_s": _one_thread(sheet, drawn.median),
        "host_adam_params_per_s": _value(
            drawn.median / FUSED_UPDATE_BYTES,
            "assumed",
            f"the same DRAM traffic a second as stock's passes, at {FUSED_UPDATE_BYTES} bytes per "
            f"parameter instead of {STOCK_UPDATE_BYTES}",
        ),
    }


def _one_thread(sheet: Sheet, drawn_bytes_per_s: float) -> Quantity:
    core, whose = sheet.core
    said = f"{core / 1e9:g} GB/s of DRAM for {whose}, {STOCK_UPDATE_BYTES} bytes a parameter"
    if sheet.numa_nodes > 1:
        core, said = core / _UNBOUND, f"{said}, less by {_UNBOUND:g} where nobody binds ranks to a socket"
    rate = min(core, drawn_bytes_per_s) / STOCK_UPDATE_BYTES
    return _value(rate, "assumed", said, _CORE_SPREAD)


def _passes_bytes_per_s(rate: float) -> float:
    # The published speed covers an update, and a copy of the new parameters to the GPU through unpinned memory.
    copied = FRESH_PASSES * _WIRE_BYTES
    bound_by_core = STOCK_UPDATE_BYTES / (1 / rate - _WIRE_BYTES / _PAGEABLE)
    return max(bound_by_core, (STOCK_UPDATE_BYTES + copied) * rate)


def _drawn_bytes_per_s(sheet: Sheet) -> Quantity:
    # If a speed of the update (parameters per second) was published for the machine, the bandwidth is computed from
    # this speed. If the speed was published for several concurrent ranks, this bandwidth is a lower limit. If no speed
    # was published, a fraction of a NUMA node's bandwidth is assumed (``Sheet.alone``). For a server with many memory
    # channels, the fraction is one half: in a published measurement, a single rank on an A100 node used half of its
    # socket's bandwidth.
    node = sheet.triad_bytes_per_s / sheet.numa_nodes
    if not sheet.stock_update:
        said = f"{sheet.alone:.0%} of one NUMA node's DRAM at {STOCK_UPDATE_BYTES} bytes per parameter"
        return _value(sheet.alone * node, "assumed", said)
    ranks = min(sheet.stock_update)
    low, high, said = sheet.stock_update[ranks]
    drawn = min(_passes_bytes_per_s(math.sqrt(low * high)), node)
    detail = f"{said}, less the new parameters' way to the device: {DOS}"
    if ranks == 1:
        return _value(drawn, sheet.stock_source, detail)
    return Quantity(
        median=drawn,
        q1=_SPREAD["published"][0] * drawn,
        q3=_SPREAD["assumed"][1] * drawn,
        detail=f"{detail}; of one rank alone nothing is published: it has at least as much, and at "
        f"most a NUMA node's DRAM, {node / drawn:.1f} times that",
    )


def _rank_shares(sheet: Sheet) -> dict[int, dict[ShareName, Quantity]]:
    # Fractions of DRAM bandwidth follow from published rates of CPU updates, and fractions of link bandwidth from the
    # wiring of the GPUs.
    shares = _dram_shares(sheet)
    if sheet.ranks_per_uplink > 1:
        for ranks in range(sheet.ranks_per_uplink, sheet.gpus + 1, sheet.ranks_per_uplink):
            detail = f"{sheet.ranks_per_uplink} GPUs behind one PCIe switch, whose uplink they share"
            part = _value(1 / sheet.ranks_per_uplink, "datasheet", detail)
            shares[ranks] = {**shares.get(ranks, {}), "h2d": part, "d2h": part}
    return shares


def _dram_shares(sheet: Sheet) -> dict[int, dict[ShareName, Quantity]]:
    # The fractions are computed from published rates of CPU updates.
    shares: dict[int, dict[ShareName, Quantity]] = {}
    for ranks, (low, high, said) in sheet.stock_update.items():
        if ranks > 1:
            middle = math.sqrt(low * high)
            apart = max(1.04, (high / middle) ** _QUARTILE_OF_EIGHTY_PERCENT)
            parts = [
                min(1 / ranks, _passes_bytes_per_s(rate) / sheet.triad_bytes_per_s)
                for rate in (middle / apart, middle, middle * apart)
            ]
            shares[ranks] = {
                "dram": Quantity(
                    q1=parts[0],
                    median=parts[1],
                    q3=parts[2],
                    source=sheet.stock_source,
                    detail=f"{said}, less the new parameters' way to the device: {DOS}",
                )
            }
    return shares


def _collectives(sheet: Sheet) -> dict[str, Quantity]:
    if sheet.gpus == 1:
        return {}
    if sheet.nvlink:
        rate, detail = sheet.nvlink
        found = _value(EFFICIENCY * rate, "datasheet", f"{EFFICIENCY:.0%} of {detail}")
    elif sheet.peer:
        detail = f"{PCIE_EFFICIENCY:.0%} of the rate of pinned copies, from GPU to GPU over PCIe"
        found = _value(PCIE_EFFICIENCY * sheet.link[0], "assumed", detail, _PEER_RINGS)
    else:
        shares = next(shares for most, shares in _THROUGH_HOST.items() if sheet.gpus <= most)
        detail = f"of the rate of pinned copies, through host memory, as no card of {sheet.gpus} reads another's memory"
        gather, reduce = (
            _value(share * sheet.link[0], "assumed", f"{share:.0%} {detail}", _HOST_RINGS) for share in shares
        )
        return {"gather_bytes_per_s": gather, "reduce_bytes_per_s": reduce}
    return {"gather_bytes_per_s": found, "reduce_bytes_per_s": found}


def _wires(sheet: Sheet) -> dict[str, Quantity]:
    wires = {LINK: sheet.nvlink, PAIR: sheet.nvlink_pair}
    return {name: _value(rate, "datasheet", detail) for name, wire in wires.items() if wire for rate, detail in [wire]}


BUILDERS.append(preset)  # makes the presets known to `Machine.preset`
