"""Tests of the token count of a profiled training step, which is read from the shapes of the model's
inputs or left open.
"""

import pytest
import torch
from ebbtide.profiler.watcher import tokens_of
from torch import nn

LANGUAGE = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
IDS = torch.zeros(2, 32, dtype=torch.int64)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((IDS,), {}),
        ((IDS, IDS), {}),
        ((), {"input_ids": IDS, "attention_mask": torch.ones(2, 32), "labels": IDS}),
        ((), {"labels": torch.zeros(2, 8, dtype=torch.int64), "input_ids": IDS}),
        (({"tokens": IDS.int(), "targets": IDS},), {}),
    ],
)
def test_ids_of_batch_times_sequence_are_counted(args, kwargs):
    assert tokens_of(LANGUAGE, args, kwargs) == 64


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)), {}),  # images and class numbers
        ((torch.zeros(2, 8), IDS), {}),  # the first tensor holds real numbers, so the integers may be targets
        ((IDS, torch.zeros(2, 8, dtype=torch.int64)), {}),  # two lengths, so it is unclear which one counts
        ((torch.zeros(2, dtype=torch.int64),), {}),
        ((), {"input_ids": torch.zeros(2, 32)}),
        (("text",), {}),
    ],
)
def test_what_cannot_be_told_is_left_open(args, kwargs):
    assert tokens_of(LANGUAGE, args, kwargs) is None


def test_without_an_embedding_integers_are_no_tokens():
    assert tokens_of(nn.Linear(4, 4), (IDS,), {}) is None
