"""Trains every published configuration as stock and under a plan: ``python -m tests.runtime.zoo``.

Takes minutes. Prints what differs or is refused by one side only, and the counts.
"""

from __future__ import annotations

import json
from collections import Counter

import runtime
from studies.bench.deepspeed_ops import build_host_ops
from studies.bench.many_engines import answer_once
from studies.bench.rank import become_only_rank
from tests.runtime.zoo.configs import as_trained, offloads, published, zero_of
from tests.runtime.zoo.training import Outcome, stock, trained


def main() -> None:
    import deepspeed

    answer_once()
    build_host_ops()
    become_only_rank()
    deepspeed.init_distributed()
    runtime.enable()
    verdicts: dict[str, str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for row in published():
        config = as_trained(row.config)
        if "nvme" in json.dumps(zero_of(config)):
            continue  # stock would build its op for drives, for minutes
        written = json.dumps(config, sort_keys=True)
        if written not in verdicts:
            ours = trained(config, {"plan": "auto"})
            # ZenFlow's own process does not end with its engine: stock would hang here.
            alone = bool(ours.error) and "zenflow" in zero_of(config)
            verdicts[written] = (
                "refused under a plan only" if alone else _verdict(stock(written), ours)
            )
            if verdicts[written] in ("differs", "refused under a plan only"):
                print(f"{row.name}: {verdicts[written]} {ours.error[:400]}", flush=True)
        counts["offloads" if offloads(config) else "no offload", verdicts[written]] += 1
    for (kind, verdict), number in sorted(counts.items()):
        print(f"{number:4} {kind}: {verdict}")


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
