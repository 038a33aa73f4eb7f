"""Fixtures that let tests of the runtime treat a machine without a GPU as one with a GPU."""

import sys

import pytest

from studies.bench.many_engines import freeze_heap
from tests.runtime import fake_cuda


@pytest.fixture(autouse=True)
def quick_collections():
    """Exclude all present objects from garbage collection, so that the collections that DeepSpeed runs for
    every engine are fast.
    """
    if "deepspeed.runtime.engine" in sys.modules:
        freeze_heap()


@pytest.fixture
def front_door(only_rank):
    """Make `deepspeed.initialize` read the config key ``ebbtide``."""
    import ebbtide.runtime

    ebbtide.runtime.enable()
    yield
    ebbtide.runtime.disable()


@pytest.fixture
def small_blocks(monkeypatch):
    """Write checkpoints in blocks of 32 KiB. Most of a small model's state is then still read from the memory that
    training uses while the first blocks are written.
    """
    from ebbtide.runtime.checkpoint.deepspeed.engine import LazyCheckpointEngine

    monkeypatch.setitem(LazyCheckpointEngine.__init__.__kwdefaults__, "block_bytes", 2**15)


@pytest.fixture
def dynamo(monkeypatch):
    """Enable torch.compile, which is off in all other tests, and yield the counters of torch._dynamo."""
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    reset()
    counters.clear()
    yield counters
    assert counters["frames"]["ok"]


@pytest.fixture
def fake(monkeypatch):
    """Run `CudaDevice`, the runtime's GPU device, on a fake torch.cuda. A violation of CUDA's rules fails the test."""
    made = fake_cuda.install(monkeypatch)
    yield made
    made.close()
    assert not made.violations


@pytest.fixture
def late_deepspeed(fake, monkeypatch):
    """Make DeepSpeed's own CUDA streams run their work late, as ebbtide's streams do on the fake torch.cuda."""
    fake_cuda.install_under_deepspeed(monkeypatch, fake)
    return fake
