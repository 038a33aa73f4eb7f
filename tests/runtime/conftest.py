"""A machine without a GPU, taken for one that has it."""

import pytest

from tests.runtime import fake_cuda
from tests.runtime.heap import freeze_imports


@pytest.fixture(autouse=True)
def quick_collections():
    """Those that DeepSpeed asks for with every engine."""
    freeze_imports()


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
