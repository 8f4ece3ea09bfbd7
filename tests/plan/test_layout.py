"""Layout arithmetic: every rank has one place, every layer one stage, every sample one microbatch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain.arch.layout import Coordinate, Layout, broken_rules, microbatches_come_in, most_microbatches
from mtrain.base.errors import ConfigError
from tests.config.samples import config
from tests.messages import refuses

degrees = st.integers(1, 5)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, cp, dp, pp = (draw(degrees) for _ in range(4))
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, vpp=draw(degrees) if pp > 1 else 1)


@given(layouts())
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    coordinates = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(layout.world_size))
    sizes = (layout.tp, layout.cp, layout.dp, layout.pp)
    assert all(0 <= axis < size for place in coordinates for axis, size in zip(place, sizes, strict=True))


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(2, 3, 2, 2), (4, 1, 3, 2), (1, 2, 1, 4), (2, 2, 2, 1)])
def test_groups_are_those_of_megatron(tp: int, cp: int, dp: int, pp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp)
    theirs = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for axis in Coordinate._fields:
        neighbours: dict[Coordinate, list[int]] = {}
        for rank in range(layout.world_size):
            neighbours.setdefault(layout.coordinate(rank)._replace(**{axis: 0}), []).append(rank)
        assert sorted(neighbours.values()) == sorted(theirs.get_ranks(axis))


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_stages_partition_the_layers_in_order(pp: int, vpp: int, data: st.DataObject) -> None:
    vpp = vpp if pp > 1 else 1
    counts = data.draw(st.lists(st.integers(1, 5), min_size=pp * vpp, max_size=pp * vpp))
    layout = Layout(pp=pp, vpp=vpp, stage_layers=tuple(counts))
    held = {(p, v): layout.layers(sum(counts), p, v) for p in range(pp) for v in range(vpp)}
    in_model_order = [layer for v in range(vpp) for p in range(pp) for layer in held[p, v]]
    assert in_model_order == list(range(sum(counts)))
    assert [len(held[p, v]) for v in range(vpp) for p in range(pp)] == counts


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({}, (2, 2, 2, 2)),
        ({"first_stage_layers": 5}, (5, 1, 1, 1)),
        ({"last_stage_layers": 2}, (2, 2, 2, 2)),
        ({"first_stage_layers": 3, "last_stage_layers": 1}, (3, 2, 2, 1)),
        ({"stage_layers": [1, 1, 4, 2]}, (1, 1, 4, 2)),
    ],
)
def test_uneven_stages_follow_the_configuration(split: dict[str, int], expected: tuple[int, ...]) -> None:
    layout = Layout.from_config(config(layout={"pp": 2, "vpp": 2, **split}), world_size=2)
    assert layout.layers_per_stage(8) == expected


def test_two_given_ends_need_no_middle() -> None:
    section = {"pp": 2, "first_stage_layers": 3, "last_stage_layers": 5}
    assert Layout.from_config(config(layout=section), world_size=2).layers_per_stage(8) == (3, 5)


@given(degrees, st.integers(1, 8), st.integers(1, 9))
def test_microbatches_make_up_the_global_batch(dp: int, micro: int, num: int) -> None:
    assert Layout(dp=dp).num_microbatches(dp * micro * num, micro) == num


def test_dp_is_what_the_other_axes_leave() -> None:
    layout = Layout.from_config(config(layout={"tp": 2, "sp": True, "pp": 2, "cp": 2}), world_size=16)
    assert (layout.tp, layout.sp, layout.pp, layout.cp, layout.dp, layout.world_size) == (2, True, 2, 2, 2, 16)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(), "tp1-pp1-cp1-dp1"),
        (Layout(tp=2, sp=True, pp=2, vpp=2, cp=2), "tp2sp-pp2vpp2-cp2-dp1"),
        (Layout(pp=2, cp=2, dp=3, cp_comm="ulysses", stage_layers=(1, 2)), "tp1-pp2[1+2]-cp2ulysses-dp3"),
        (Layout(dp=4, ep=2, etp=2), "tp1-pp1-cp1-dp4-ep2etp2"),
    ],
    ids=str,
)
def test_layouts_have_short_names(layout: Layout, name: str) -> None:
    assert str(layout) == name


@pytest.mark.parametrize(
    ("changes", "world_size", "fact"),
    [
        (
            {"layout": {"tp": 2, "cp": 2}},
            6,
            "world size 6",
        ),
        ({}, 0, "world size 0"),
        ({}, 3, "train.global_batch_size=16"),
        ({"train__micro_batch_size": 3}, 2, "train.global_batch_size=16"),
        (
            {"layout": {"pp": 4, "vpp": 2}},
            32,
            "layout.vpp=2",
        ),
        (
            {"layout": {"pp": 4, "vpp": 2}, "train__micro_batch_size": 8, "train__global_batch_size": 48},
            4,
            "layout.vpp=2",
        ),
        (
            {"layout": {"pp": 2, "vpp": 2}, "model__megatron": {"microbatch_group_size_per_vp_stage": 17}},
            2,
            "model.megatron.microbatch_group_size_per_vp_stage=17",
        ),
    ],
)
def test_what_does_not_fit_the_world_size_is_named(changes: dict[str, object], world_size: int, fact: str) -> None:
    (found,) = broken_rules(config(**changes), world_size)
    with refuses(ConfigError, fact) as refused:
        Layout.from_config(config(**changes), world_size)
    assert str(refused.value) == found


def test_experts_divide_the_ranks_of_a_stage() -> None:
    legal = config(layout__tp=2)
    with_experts = legal.model_copy(update={"layout": legal.layout.model_copy(update={"ep": 3})})
    assert broken_rules(with_experts, 6) == [
        "train.global_batch_size=16 must be a multiple of 3 = dp=3 (world size 6) "
        "x train.micro_batch_size=1; change one of them"
    ]
    (found,) = broken_rules(with_experts, 8)
    assert found.startswith("world size 8 / layout.pp=1 must be a multiple of layout.ep=3 x layout.etp=1")


PACKED = {"kind": "mock", "seq_length": 64, "isolate_documents": True, "packing": {}}


def test_packed_samples_need_not_divide_over_ranks() -> None:
    given = config(data=PACKED, train__micro_batch_size=3)
    assert broken_rules(given, 2) == []
    # 16 samples in rows of their own: 3 a microbatch on each of 2 ranks
    assert most_microbatches(given, Layout(dp=2)) == 3
    assert most_microbatches(config(), Layout(dp=2)) == 8


@pytest.mark.parametrize(("megatron", "group"), [({}, 4), ({"microbatch_group_size_per_vp_stage": 5}, 5)], ids=str)
def test_packed_microbatches_come_in_groups_of_the_interleaved_schedule(megatron: dict[str, int], group: int) -> None:
    given = config(data=PACKED, layout={"pp": 4, "vpp": 2}, model__megatron=megatron)
    assert broken_rules(given, 4) == []
    assert microbatches_come_in(given) == group
    assert most_microbatches(given, Layout(pp=4, vpp=2)) == {4: 16, 5: 20}[group]
    smaller = config(data=PACKED, layout={"pp": 4, "vpp": 2}, model__megatron={"microbatch_group_size_per_vp_stage": 3})
    (found,) = broken_rules(smaller, 4)
    assert "no group may be smaller than layout.pp=4" in found


@given(st.integers(2, 4), st.integers(1, 24), st.integers(1, 8))
def test_the_interleaved_schedule_is_refused_exactly_where_megatron_refuses_it(pp: int, num: int, group: int) -> None:
    given = config(
        layout={"pp": pp, "vpp": 2},
        model__num_layers=2 * pp,
        model__megatron={"microbatch_group_size_per_vp_stage": group},
        train__global_batch_size=num,
    )
    accepted = not (group > num or group < pp) and not 0 < num % group < pp
    assert (broken_rules(given, pp) == []) == accepted
