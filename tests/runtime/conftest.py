"""A machine without a GPU, taken for one that has it."""

import sys

import pytest

from studies.bench.many_engines import freeze_heap
from tests.runtime import fake_cuda


@pytest.fixture(autouse=True)
def quick_collections():
    """Those that DeepSpeed asks for with every engine."""
    if "deepspeed.runtime.engine" in sys.modules:
        freeze_heap()


@pytest.fixture
def dynamo(monkeypatch):
    """torch.compile compiles, as it does not in the other tests; what did is counted."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    reset()
    counters.clear()
    yield counters
    assert counters["frames"]["ok"]


@pytest.fixture
def fake(monkeypatch):
    """`CudaDevice` runs on a stand-in for torch.cuda; what breaks CUDA's rules fails the test."""
    made = fake_cuda.install(monkeypatch)
    yield made
    made.close()
    assert not made.violations


@pytest.fixture
def late_deepspeed(fake, monkeypatch):
    """DeepSpeed's own streams are late as well."""
    fake_cuda.install_under_deepspeed(monkeypatch, fake)
    return fake
