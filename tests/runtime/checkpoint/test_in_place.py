"""Tests of loading a checkpoint straight into the memory of the weights and optimizer state. One test checks
that a load accepts a pickled call of ``getattr`` only if the call returns a member of an enum.
"""

import pytest
import torch
from ebbtide.runtime.checkpoint.deepspeed.loading import weights_in_place
from ebbtide.runtime.checkpoint.errors import CheckpointError
from ebbtide.runtime.checkpoint.format import safe_load
from ebbtide.runtime.checkpoint.format.safe_load import load_file

from studies.bench.bits import state_of
from studies.bench.byte_gpt import SIZES, ByteGPT
from tests.runtime.contract.training import DEVICES, attached, start, train

MIX = ["host", "device", "resident"]


@pytest.mark.usefixtures("only_rank")
def test_weights_below_zero_3_are_read_in_place_and_a_custom_loader_gets_its_own(tmp_path):
    engine = attached(start(stage=2), MIX, list(DEVICES)[-1])
    train(engine, 2)
    saved = {name: tensor.clone() for name, tensor in state_of(engine).items()}
    weights = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    engine.save_checkpoint(tmp_path)
    train(engine, 2, first=2)
    engine.load_checkpoint(tmp_path)
    assert all(torch.equal(t, saved[name]) for name, t in state_of(engine).items())
    live = engine.module.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in live.items())
    addresses = {t.data_ptr() for t in live.values()}
    assert {t.data_ptr() for t in weights_in_place(engine).values()} == addresses
    given = []
    engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: given.append(src))
    assert not addresses & {t.data_ptr() for t in given[0].values()}
    engine.destroy()


class Engine:
    """A stand-in for a DeepSpeed engine. `weights_in_place` reads its attributes to decide whether a load may read
    a checkpoint directly into the model's weights.
    """

    mp_world_size = 1

    def __init__(self, module, *, partitioned=False):
        self.module = module
        self._partitioned = partitioned

    def zero_optimization_partition_weights(self):
        return self._partitioned


class Merging(torch.nn.Linear):
    def _load_from_state_dict(self, state, prefix, *args):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *args)


def hooked(register):
    model = ByteGPT(SIZES["tiny"])
    getattr(model, register)(lambda *_: None)
    return Engine(model)


def test_who_looks_at_the_weights_on_their_way_gets_copies():
    assert set(weights_in_place(Engine(ByteGPT(SIZES["tiny"])))) == {
        ("module", name) for name in ByteGPT(SIZES["tiny"]).state_dict()
    }
    assert weights_in_place(Engine(torch.nn.BatchNorm1d(4))), (
        "a version check of torch's own must not prevent loading in place"
    )
    assert not weights_in_place(Engine(ByteGPT(SIZES["tiny"]), partitioned=True))
    assert not weights_in_place(Engine(torch.nn.Sequential(Merging(4, 4))))
    for register in ("register_load_state_dict_pre_hook", "register_state_dict_post_hook"):
        assert not weights_in_place(hooked(register)), register


def test_what_is_not_host_memory_is_filled_through_some(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_load, "CHUNK_BYTES", 1000)
    target = torch.zeros(7, 500, dtype=torch.bfloat16)
    there = target.untyped_storage().data_ptr()
    monkeypatch.setattr(safe_load, "on_host", lambda t: t.untyped_storage().data_ptr() != there)
    tree = {"module": {"w": torch.randn(7, 500).bfloat16(), "step": torch.tensor(3)}}
    torch.save(tree, tmp_path / "file.pt")
    found = safe_load.load_file(tmp_path / "file.pt", {("module", "w"): target})
    assert found["module"]["w"] is target
    assert torch.equal(target, tree["module"]["w"])
    assert found["module"]["step"] == 3


class _AsPython311:
    """A member of an enum that is pickled as Python 3.11.0 to 3.11.3 does: as a ``getattr`` of its class."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_members_of_enums_are_read_however_python_has_pickled_them(tmp_path):
    # Some versions of Python 3.11 pickle DeepSpeed's ``zero_stage`` as such a call.
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"zero_stage": _AsPython311(ZeroStageEnum, "weights")}, tmp_path / "enum.pt")
    assert load_file(tmp_path / "enum.pt") == {"zero_stage": ZeroStageEnum.weights}
    for kind, name in ((dict, "clear"), (ZeroStageEnum, "__class__"), (ZeroStageEnum, "mro")):
        torch.save(_AsPython311(kind, name), tmp_path / "other.pt")
        with pytest.raises(CheckpointError, match="may call getattr only for members of enums"):
            load_file(tmp_path / "other.pt")
