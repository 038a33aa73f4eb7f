"""Test of the study of offloading parameters to host memory, at its smallest size."""

import pytest
import torch

from studies.parameter_offload import measure
from studies.trials.paced_model import PacedTraining

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def test_stock_and_both_plans_train_the_same_bits(only_rank):
    found = measure(PacedTraining(layers=4, hidden=64).scaled(0.05), steps=1)
    assert found["bit_identical"] is True
    assert [row["name"] for row in found["rows"]] == ["all on the host", "a share on the device", "stock"]
    assert all(found[key] > 0 for key in ("speedup_over_stock", "speedup_of_share", "predicted_over_measured"))
