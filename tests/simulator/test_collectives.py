"""Tests of the simulated traffic between nodes: for any number of ranks, its time is that of the busiest node."""

from itertools import pairwise

import pytest
from ebbtide.simulator import build_strategy, preset, simulate, workload_from_model
from ebbtide.simulator.engines.reference import capacities
from ebbtide.simulator.estimates.collectives import Topology
from ebbtide.simulator.estimates.models.blocks import ModelError
from hypothesis import given, settings
from hypothesis import strategies as st

MODEL = {"name": "m", "layers": 4, "hidden": 4096, "heads": 32, "vocabulary": 32000}
A100 = preset("a100-node")


def work(machine=A100, **shape):
    return workload_from_model(MODEL, machine, **{"micro_batch": 1, **shape})


def network_s(data, machine=A100):
    """Return how many seconds the parameter gather of one layer uses the network in the simulator, if the ranks of a
    node share the network.
    """
    made = work(machine, data_parallel=data)
    rate = capacities(machine, made.ranks_per_node)["network"]
    return made.layers[1].network_gather_bytes / rate


def test_a_ring_enters_each_node_once_whether_or_not_nodes_are_full():
    whole = 2 * work().layers[1].params
    for data in range(5, 20):
        expected = (data - 1) / data * whole / A100.rate("network_bytes_per_s")
        assert network_s(data) == pytest.approx(expected, rel=1e-4)
    assert [network_s(data) for data in range(1, 5)] == [0.0] * 4


def test_more_ranks_take_the_network_a_little_longer_never_a_third_longer():
    taken = [network_s(data) for data in range(5, 33)]
    assert taken == sorted(taken)
    assert network_s(6) / network_s(8) == pytest.approx((5 / 6) / (7 / 8), rel=1e-4)
    forwards = [
        simulate(build_strategy("zero3_offload", work(data_parallel=data)), A100).phases()["forward_s"]
        for data in range(4, 17)
    ]
    assert forwards == sorted(forwards)


@pytest.mark.parametrize("stage", [1, 2])
def test_below_zero_3_too(stage):
    sizes = [work(data_parallel=n, zero_stage=stage) for n in range(5, 17)]
    sent = [w.network_step_gather_bytes * w.ranks_per_node for w in sizes]
    assert all(a < b < 1.2 * a for a, b in pairwise(sent))
    inside = [work(data_parallel=n, zero_stage=stage).step_gather_s for n in (4, 5, 6, 7, 8)]
    assert inside == pytest.approx([inside[0]] * 5, rel=1e-3)  # always four ranks of a node


def by_counting(layout):
    """Count rings and groups of ranks that extend over several nodes, from a list of all ranks and their nodes. A test
    compares the numbers with the simulator's formulas.

    Returns:
        Two numbers. The first is the largest number of data-parallel rings that connect one node with other nodes. Only
        nodes that have ranks of pipeline stage ``layout.stage`` count for it. The second is the largest number of
        tensor-parallel groups that one node shares with other nodes. All nodes count for it.
    """
    span = layout.data * layout.tensor
    node = {rank: rank // layout.gpus_per_node for rank in range(layout.gpus)}
    mine = {node[r] for r in node if r // span == layout.stage}
    rings, groups = {}, {}
    for rank in node:
        rings.setdefault((rank // span, rank % layout.tensor), set()).add(node[rank])
        groups.setdefault(rank // layout.tensor, set()).add(node[rank])
    entering = max(sum(n in nodes and len(nodes) > 1 for nodes in rings.values()) for n in mine)
    cut = max(sum(n in nodes and len(nodes) > 1 for nodes in groups.values()) for n in node.values())
    return entering, cut


@st.composite
def layouts(draw):
    size = st.integers(1, 9)
    pipeline = draw(st.integers(1, 4))
    stage = draw(st.integers(0, pipeline - 1))
    return Topology(draw(size), draw(size), draw(size), pipeline, stage)


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_any_layout_is_as_counted_rank_by_rank(layout):
    entering, cut = by_counting(layout)
    part = (layout.data - 1) / layout.data * 1e9 / layout.ranks_per_node
    assert layout.entering_bytes(1e9) == pytest.approx(entering * part)
    # The layout does not record which nodes a group spans. At most two links can be cut.
    assert cut <= layout.tensor_groups_cut <= 2
    assert (cut > 0) == (layout.tensor_groups_cut > 0)


def test_tensor_parallelism_between_nodes_takes_the_network():
    # Each of two all-reduces per layer sends 7/8 of the activations twice over the network, at 8.3 GB/s.
    four, eight = (work(tensor_parallel=n, micro_batch=8) for n in (4, 8))
    size = 8 * 2048 * 4096 * 2
    crossing_s = 2 * 2 * 7 / 8 * size / A100.rate("network_bytes_per_s")
    assert eight.layers[1].forward_s > crossing_s
    assert eight.layers[1].forward_s < crossing_s + four.layers[1].forward_s
    assert eight.layers[1].backward_s > 2 * crossing_s  # the recomputed forward communicates too
    assert "over the network: 8 ranks do not fit into nodes of 4 GPUs" in eight.provenance
    assert "network" not in four.provenance
    slower, faster = (
        work(A100.with_rates(network_bytes_per_s=rate), tensor_parallel=8, micro_batch=8) for rate in (4e9, 16e9)
    )
    assert slower.layers[1].forward_s > eight.layers[1].forward_s > faster.layers[1].forward_s


def test_both_exchanges_cannot_have_the_network_at_once():
    one, two = (work(tensor_parallel=8, data_parallel=n, micro_batch=8) for n in (1, 2))
    assert one.layers[1].network_gather_bytes == 0
    exchanged = 2 * 2 * 7 / 8 * 8 * 2048 * 4096 * 2
    layer = two.layers[1]  # for each of four ranks: forward has two all-reduces, and backward two more
    beside = layer.network_gather_bytes - layer.network_reduce_bytes
    assert beside * 4 >= 2 * exchanged * (1 - 1e-6)
    more = {"data_parallel": 2, "tensor_parallel": 8, "micro_batch": 8}  # forward 1, backward 2 and its forward again
    none, half, full = (
        layer.network_gather_bytes - layer.network_reduce_bytes
        for layer in (work(activation_checkpointing=c, **more).layers[1] for c in ("none", "selective", "full"))
    )
    assert [half / none, full / none] == pytest.approx([3.5 / 3, 4 / 3], rel=1e-6)
    inside = work(tensor_parallel=4, data_parallel=2, micro_batch=8).layers[1]
    assert inside.network_gather_bytes == inside.network_reduce_bytes


def test_tensor_parallelism_beyond_a_node_needs_a_network_that_is_known():
    with pytest.raises(
        ModelError,
        match=r"tensor_parallel must divide .* but got 2 on machine 'rtx4090': add network_bytes_per"
        r"_s to the machine file, or lower tensor_parallel",
    ):
        work(preset("rtx4090"), tensor_parallel=2)
