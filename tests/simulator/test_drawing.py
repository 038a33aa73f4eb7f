import pytest
from ebbtide.simulator import Lane, OpKind, Span, Timeline
from ebbtide.simulator.drawing import COLOURS, GROUPS


def drawn(spans):
    return Timeline(tuple(spans), "predicted").plot()


@pytest.fixture(autouse=True)
def _close():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def test_rows_are_the_lanes_in_use_and_the_axis_is_in_ms():
    ax = drawn(
        [
            Span(OpKind.FORWARD, Lane.COMPUTE, 0.0, 0.5, layer=0),
            Span(OpKind.UPDATE_HOST, Lane.HOST, 0.5, 1.0, subgroup=3),
        ]
    )
    assert [t.get_text() for t in ax.get_yticklabels()] == ["device compute", "host compute"]
    assert ax.get_xlabel() == "time (ms)"
    assert ax.get_xlim() == pytest.approx((0.0, 1000.0))


def test_long_timelines_are_in_seconds():
    ax = drawn([Span(OpKind.FORWARD, Lane.COMPUTE, 0.0, 5.0)])
    assert ax.get_xlabel() == "time (s)"


def test_only_bars_that_are_wide_enough_are_labelled():
    ax = drawn(
        [
            Span(OpKind.UPDATE_HOST, Lane.HOST, 0.0, 0.9, subgroup=7),
            Span(OpKind.UPDATE_HOST, Lane.HOST, 0.9, 0.9001, subgroup=8),
        ]
    )
    assert [t.get_text() for t in ax.texts] == ["s7"]


def test_the_legend_names_each_kind_once_and_the_moments():
    ax = drawn(
        [
            Span(OpKind.BACKWARD, Lane.COMPUTE, 0.0, 0.5),
            Span(OpKind.BACKWARD, Lane.COMPUTE, 0.5, 1.0),
            Span(OpKind.NORM, Lane.COMPUTE, 1.0, 1.0),
        ]
    )
    from matplotlib.patches import Patch

    legend = ax.get_legend()
    assert [t.get_text() for t in legend.get_texts()] == ["backward", "norm"]
    assert sum(isinstance(h, Patch) for h in legend.legend_handles) == 1


def test_a_moment_that_took_time_is_in_the_legend_as_a_bar_too():
    ax = drawn([Span(OpKind.BACKWARD, Lane.COMPUTE, 0.0, 0.5), Span(OpKind.STEP_END, Lane.COMPUTE, 0.5, 0.6)])
    told = [t.get_text() for t in ax.get_legend().get_texts()]
    assert told == ["backward", "step end", "until step end"]


def test_an_empty_timeline_can_be_drawn():
    assert drawn([]).get_yticks().size == 0


def test_every_group_of_ops_has_a_colour_of_its_own():
    assert set(GROUPS) == set(OpKind) - {OpKind.STEP_END}
    assert set(COLOURS) == set(GROUPS.values())
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_lane_is_named_after_what_it_does():
    ax = drawn([Span(OpKind.GRADIENT_H2D, Lane.H2D, 0.0, 0.5), Span(OpKind.STATE_H2D, Lane.H2D, 0.5, 0.5)])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["H2D gradients"]
    both = drawn([Span(OpKind.GRADIENT_H2D, Lane.H2D, 0.0, 0.5), Span(OpKind.STATE_H2D, Lane.H2D, 0.5, 1.0)])
    assert [t.get_text() for t in both.get_yticklabels()] == ["H2D, several"]
