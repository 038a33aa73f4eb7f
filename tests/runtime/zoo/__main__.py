"""Training with every published DeepSpeed config, by stock DeepSpeed and under a plan: ``python -m tests.runtime.zoo``.

A run takes minutes. The command prints differences in the results, configs that only stock DeepSpeed or
only ebbtide refuses, wrong predictions of `tune doctor`, and the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import ebbtide.runtime
from ebbtide.runtime.hardware.launcher import free_port, remove_shared_buffers
from ebbtide.tuner.doctor.under_a_plan import under_a_plan

from studies.bench.deepspeed_ops import build_host_ops
from studies.bench.many_engines import answer_once
from studies.bench.rank import become_only_rank
from tests.runtime.zoo.configs import TABLE, as_trained, offloads, published, zero_of
from tests.runtime.zoo.training import STEPS, Outcome, stock, trained

SUBGROUP = 5_000  # elements, for several subgroups of the tiny model
DEADLINE = timedelta(minutes=3)  # limit for a collective, after which a waiting rank ends with an error
TOLD = {
    "trains under a plan": "same bits under a plan",
    "left to DeepSpeed": "left to stock",
    "refused: ": "refused under a plan only",
    "DeepSpeed itself": "refused by stock",
}


def main() -> None:
    asked = _arguments()
    if asked.ranks > 1 and "RANK" not in os.environ:
        sys.exit(_on_ranks(asked.ranks))
    import deepspeed

    answer_once()
    build_host_ops()
    become_only_rank()
    deepspeed.init_distributed(timeout=DEADLINE)
    ebbtide.runtime.enable()
    verdicts: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, config in _chosen(asked):
        written = json.dumps(config, sort_keys=True)
        if written not in verdicts:
            verdicts[written] = _tried(name, config, asked.streams)
        counts["offloads" if offloads(config) else "no offload", verdicts[written]] += 1
    if os.environ["RANK"] == "0":
        for (kind, verdict), number in sorted(counts.items()):
            print(f"{number:4} {kind}: {verdict}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.runtime.zoo", description=__doc__)
    parser.add_argument("--table", type=Path, default=TABLE, help="JSON file with the published configs to try")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--streams",
        action="store_true",
        help="train on emulated streams, with all placements in turn after the watched steps",
    )
    parser.add_argument(
        "--part", default="1/1", help="part of the configs to try, as I/N: the I-th of N parts, counted from 1"
    )
    parser.add_argument("--only", default="", help="text that the names of the configs to try contain")
    return parser.parse_args()


def _on_ranks(ranks: int) -> int:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(port),
        "-m",
        "tests.runtime.zoo",
        *sys.argv[1:],
    ]
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        remove_shared_buffers(port)


def _chosen(asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    # With several ranks or with ``--streams`` (training on the emulated GPU), only configs with offload are yielded,
    # because all other configs train as stock DeepSpeed anyway. The subgroups of the yielded configs are made small, so
    # that the model has several.
    number, parts = map(int, asked.part.split("/"))
    closer = asked.streams or asked.ranks > 1
    for row in published(asked.table)[number - 1 :: parts]:
        config = as_trained(row.config, SUBGROUP if closer else None)
        if asked.only in row.name and (offloads(config) or not closer):
            yield row.name, config


def _tried(name: str, config: dict[str, Any], streams: bool) -> str:
    key = {"plan": "auto", **({"device": "emulated"} if streams else {})}
    ours = trained(config, key, STEPS, mixed=streams)
    # The process of ZenFlow does not end with its engine, so DeepSpeed alone would hang here.
    alone = bool(ours.error) and "zenflow" in zero_of(config)
    mine = "refused under a plan only" if alone else _verdict(stock(json.dumps(config, sort_keys=True)), ours)
    verdict = _of_all_ranks(mine)
    said = under_a_plan(config)[0].detail
    told = next((v for k, v in TOLD.items() if said.startswith(k)), said)
    told = "" if verdict == "refused by stock" or told == verdict else f" (the doctor: {said})"
    if told or verdict in ("differs", "refused under a plan only"):
        print(f"{name}: {mine} {ours.error[:400]}{told}", flush=True)
    return verdict


def _of_all_ranks(mine: str) -> str:
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found[0] if len(set(found)) == 1 else "differs"


def _verdict(expected: Outcome, ours: Outcome) -> str:
    if expected.error:
        return "refused by stock" if ours.error else "refused by stock only"
    if ours.error:
        return "refused under a plan only"
    if not ours.same(expected):
        return "differs"
    return "same bits under a plan" if ours.planned else "left to stock"


if __name__ == "__main__":
    main()
