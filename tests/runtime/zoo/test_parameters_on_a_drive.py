"""Tests of plans with ``offload_param.device: nvme`` in the DeepSpeed config. The plan places the optimizer state, and
DeepSpeed's swapper moves the parameters.

The tests are skipped if DeepSpeed's ``async_io`` op has not been built, because its build takes minutes.
``python -m tests.runtime.zoo`` builds the op.
"""

from pathlib import Path

import pytest
import torch
from ebbtide.runtime import session_of
from torch.utils import cpp_extension

from studies.bench.byte_gpt import ByteGPTConfig
from tests.runtime.zoo.configs import HIDDEN, as_trained
from tests.runtime.zoo.training import trained

# A parameter of less than a megabyte is not written to a drive.
SMALL = ByteGPTConfig(layers=2, hidden=HIDDEN, heads=2, sequence=16)
LARGE = ByteGPTConfig(layers=1, hidden=512, heads=2, sequence=16)
BUILT = Path(cpp_extension._get_build_directory("async_io", False)) / "async_io.so"
pytestmark = [
    pytest.mark.usefixtures("front_door"),
    pytest.mark.skipif(not BUILT.exists(), reason="DeepSpeed's async_io op is not built here"),
]
EMULATED = {"plan": "auto", "device": "emulated"}


def config(folder, in_host_memory, subgroup, **zero):
    """Return a DeepSpeed config that keeps at most ``in_host_memory`` elements of the parameters in host
    memory, and the other parameters on a drive.

    The config turns prefetching off, because DeepSpeed's own prefetch from a drive fails in its second step.
    """
    held = {"device": "nvme", "max_in_cpu": in_host_memory, "buffer_count": 8, "buffer_size": 1_100_000}
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": held,
        "sub_group_size": subgroup,
        "stage3_prefetch_bucket_size": 0,
        **zero,
    }
    made = as_trained(
        {
            "bf16": {"enabled": True},
            "gradient_clipping": 0.1,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        }
    )
    made["zero_optimization"]["offload_param"]["nvme_path"] = str(folder)
    return made


@pytest.mark.parametrize(
    ("model", "in_host_memory", "subgroup"),
    [(SMALL, 10**9, 5_000), (SMALL, 15_000, 5_000), (LARGE, 1_500_000, 1_500_000)],
    ids=["in host memory", "too small for a drive", "on a drive"],
)
def test_every_tensor_has_stocks_bits(tmp_path, model, in_host_memory, subgroup):
    made = config(tmp_path, in_host_memory, subgroup)
    stock, ours = trained(made, model=model), trained(made, EMULATED, mixed=True, model=model)
    assert (stock.error, ours.error) == ("", "")
    assert ours.planned
    assert ours.same(stock)
    written = list(tmp_path.rglob("*.swp"))
    assert bool(written) == (model is LARGE)


def test_masters_on_a_drive_too_are_refused_in_words(tmp_path, monkeypatch):
    # DeepSpeed computes the parameters on the drive from the masters, which must be in memory for this.
    # So that there is no room for masters.
    monkeypatch.setattr("ebbtide.runtime.zero.storing.free_host_bytes", lambda: 0)
    made = config(tmp_path, 15_000, 5_000)
    made["zero_optimization"]["offload_optimizer"] |= {"device": "nvme", "nvme_path": str(tmp_path)}
    ours = trained(made, EMULATED, steps=1, model=SMALL)
    assert "offload_param.max_in_cpu must hold all of this rank's 42368 parameters" in ours.error
    made["zero_optimization"]["offload_param"]["max_in_cpu"] = 10**9
    assert trained(made, EMULATED, steps=1, model=SMALL).error == ""


def test_what_the_swapper_has_is_nobody_elses(tmp_path):
    import deepspeed
    from ebbtide.runtime.zero.attach import switch_plan

    from studies.bench.byte_gpt import ByteGPT
    from tests.runtime.contract.training import plan_for

    model = ByteGPT(SMALL)
    made = config(tmp_path, 0, 5_000)
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**made, "ebbtide": EMULATED}
    )[0]
    session = session_of(engine)
    switch_plan(engine, plan_for(engine, ["host"], locations=["device"]))
    assert set(session.plan.parameter_locations) == {"host"}
    assert not session.plan.overlap_forward
    held = [t for s in session.executor.states for t in (*s.state, s.gradient)]
    scratch = max(session.engine.sizes()) * torch.bfloat16.itemsize
    assert session_of(engine).host_bytes() == sum(t.nbytes for t in held) + scratch
    engine.destroy()
