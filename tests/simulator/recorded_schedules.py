"""Random plans in plan schema 2, an older format of the plan file, and hashes of their simulated schedules
as recorded with that schema.

python -m tests.simulator.recorded_schedules # records them again: say in the commit why
"""

import hashlib
import json
import random
from itertools import groupby
from pathlib import Path

from ebbtide.simulator import Layer, Plan, Workload, build_schedule

PATH = Path(__file__).with_name("recorded_schedules.json")
CASES = 400
PLACEMENTS = ("host", "device", "resident", "stored")
# The names of some kinds of ops have changed since the recording.
NAMES_THEN = {
    "UPDATE_HOST_EARLY: 'update host, early'": "UPDATE_GUESSED: 'update host, guessed'",
    "UPDATE_DEVICE_EARLY: 'update device, early'": "VISIT_GUESSED: 'update device, guessed'",
}


def case(number):
    """Return the workload of a numbered random case, and the fields of its plan in plan schema 2. The number
    alone decides both.
    """
    rng = random.Random(f"schedule {number}")
    stage = rng.choice([3, 3, 3, 2, 1])
    micro_batches = rng.choice([1, 1, 2, 3])
    params = [rng.randint(10, 200) for _ in range(rng.randint(1, 6))]
    left, sizes = sum(params), []
    while left:
        sizes.append(min(left, rng.randint(5, 150)))
        left -= sizes[-1]
    layers = tuple(
        Layer(
            params=n,
            forward_s=1.0,
            backward_s=rng.choice([1.0, 2.0]),
            activation_bytes=rng.choice([0, 7]),
            network_gather_bytes=rng.choice([0, 3]) * (stage == 3),
            network_reduce_bytes=rng.choice([0, 5]) * (stage > 1),
        )
        for n in params
    )
    work = Workload(
        name="w",
        layers=layers,
        subgroups=tuple(sizes),
        zero_stage=stage,
        gradient_accumulation_steps=micro_batches,
        grad_bytes_per_param=rng.choice([2, 4]),
        clip=rng.choice([True, False]),
    )
    return work, plan_fields(rng, sizes, stage)


def plan_fields(rng, sizes, stage):
    """Return the fields of a random plan, as a dict in the form of the plan's JSON file."""
    count, whole = len(sizes), stage == 3
    placements = rng.choices(PLACEMENTS if whole else PLACEMENTS[:3], k=count)
    locations = rng.choices(rng.choice([["device"], ["host"], ["device", "host"]]), k=count) if whole else []
    slots = rng.randint(1, 4)
    fields = {
        "schema_version": 2,
        "subgroup_size": max(sizes),
        "placement": [{"placement": key, "count": len(list(some))} for key, some in groupby(placements)],
        "parameter_home": [{"home": key, "count": len(list(some))} for key, some in groupby(locations)],
        "staging_slots": slots,
        "prefetch": rng.randint(0, slots),
        "host_slots": rng.randint(1, 4),
        "threads": rng.choice([0, 1, 2]),
        "overlap_forward": whole and rng.random() < 0.7,
        "order": {queue: rng.choice(["forward", "arrival"]) for queue in ("host", "device")},
        "device_sums": rng.choice([0, rng.randint(0, count + 1)]),
    }
    if whole:
        fields |= {
            "speculate": rng.choice([0, rng.randint(0, count + 1)]),
            "speculate_among": rng.choice([0, rng.randint(0, count + 1)]),
            "speculate_visits": rng.choice([0, rng.randint(0, count + 1)]),
        }
    return fields


def digest(number):
    """Return a hash of the simulated schedule of a numbered random case: all ops, and the memory that the
    schedule holds.
    """
    work, fields = case(number)
    schedule = build_schedule(work, Plan.from_fields(fields))
    held = {memory: dict(kinds) for memory, kinds in schedule.held.items()}
    text = json.dumps([[*map(repr, op)] for op in schedule.ops] + [held])
    for now, then in NAMES_THEN.items():
        text = text.replace(now, then)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":
    PATH.write_text(json.dumps([digest(number) for number in range(CASES)]) + "\n")
