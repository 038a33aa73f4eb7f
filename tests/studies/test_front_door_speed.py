"""Test of the study that compares the speed of training under `tune run` with that of training by direct calls of
ebbtide's library. In this test, both train in this process, and their results must be bit-identical.
"""

import io
import json

import ebbtide.runtime
import pytest

from studies.front_door_speed import DOORS, FIGURES, WARMUP, measure, over_pairs, train


class Told:
    """A stand-in for a training process of the study that compares `tune run` with direct calls of the library. It
    returns recorded results instead of training.
    """

    def __init__(self, text):
        lines = [line for line in text.splitlines() if line.startswith("answer ")]
        self._answers = iter([json.loads(line.removeprefix("answer ")) for line in lines])

    def ask(self, _):
        return next(self._answers)


@pytest.mark.parametrize("overlap", [False, True])
def test_both_doors_train_the_same_bits(only_rank, tmp_path, overlap):
    orders = ["step\n", "save\n"] * (WARMUP + 1) + ["state\n"]
    doors = {}
    ebbtide.runtime.enable()
    try:
        for door in DOORS:
            answers = io.StringIO()
            train(door, "tiny", overlap, tmp_path / door, orders, answers)
            assert (tmp_path / door / "latest").exists()
            doors[door] = Told(answers.getvalue())
    finally:
        ebbtide.runtime.disable()
    result = over_pairs([measure(doors, 1)])
    assert result["bit_identical"]
    assert set(result["front_door_over_library"]) == set(FIGURES)
    assert all(ratio > 0 for ratio in result["front_door_over_library"].values())
