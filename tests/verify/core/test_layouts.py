"""Layouts derived from a configuration, and names that are understood."""

from itertools import product

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.verify.core.layouts import DerivedTrials, Trial, parse_trials, prepared, shared_layers
from mtrain.verify.core.shrink import shrink
from tests.config.samples import config
from tests.messages import refuses
from tests.verify.parity.checks import expert_config


def names(user: Config, max_ranks: int = 8) -> dict[str, dict[str, str]]:
    """Returns name -> axes of the derived layouts."""
    trials = DerivedTrials(user, max_ranks).derived()
    small = shrink(user, trials).config
    return {each.name: each.axes for each in (prepared(trial, small) for trial in trials)}


def test_one_process_is_compared_over_microbatches_and_data_parallelism() -> None:
    assert names(config()) == {
        "tp1-pp1-cp1-dp1-mbs16": {},
        "tp1-pp1-cp1-dp1-mbs1": {"microbatches": "16"},
        "tp1-pp1-cp1-dp1-mbs4": {"microbatches": "4"},
        "tp1-pp1-cp1-dp2-mbs8": {"dp": "2"},
        "tp1-pp1-cp1-dp4-mbs2": {"dp": "4", "microbatches": "2"},
    }


def test_every_degree_is_tried_alone_in_pairs_and_together() -> None:
    found = names(config(layout__tp=2, layout__sp=True, layout__pp=2, layout__vpp=2, layout__cp=2))
    used = [frozenset(axes) - {"microbatches"} for axes in found.values()]
    for alone in ({"tp"}, {"tp", "sp"}, {"pp"}, {"pp", "vpp"}, {"cp"}, {"cp", "cp_comm"}, {"cp", "ring"}, {"dp"}):
        assert frozenset(alone) in used
    for together in ({"tp", "sp", "pp", "vpp"}, {"tp", "sp", "cp"}, {"pp", "vpp", "cp"}):
        assert frozenset(together) in used
    assert "tp2sp-pp2vpp2-cp2-dp1-mbs2" in found
    assert {"tp", "sp", "dp"} in used
    assert len(found) == len(used)


@pytest.mark.parametrize("max_ranks", [1, 2, 4, 8])
def test_no_layout_needs_more_ranks_than_there_are(max_ranks: int) -> None:
    user = config(layout__tp=4, layout__pp=4, layout__cp=2)
    ranks = [trial.world_size for trial in DerivedTrials(user, max_ranks).derived()]
    assert max(ranks) == max_ranks
    assert ranks[0] == 1


@pytest.mark.parametrize("max_ranks", [1, 2, 4, 8])
def test_degrees_of_experts_need_no_more_ranks_than_there_are(max_ranks: int) -> None:
    degrees = product((1, 2, 4), (1, 2), (1, 4), (1, 4), (1, 2, 4))
    for tp, pp, cp, ep, etp in degrees:
        layout = {"layout__tp": tp, "layout__pp": pp, "layout__cp": cp, "layout__ep": ep, "layout__etp": etp}
        user = expert_config(**layout, layout__sp=tp > 1)
        trials = DerivedTrials(user, max_ranks)
        assert max(trial.world_size for trial in trials.derived()) <= max_ranks
        assert trials.full().world_size <= max_ranks


def test_experts_have_a_place_in_every_layout() -> None:
    found = names(expert_config(layout__pp=2))
    used = [frozenset(axes) - {"microbatches"} for axes in found.values()]
    for alone in ({"dp", "ep"}, {"dp", "etp"}, {"tp", "sp"}, {"pp"}):
        assert frozenset(alone) in used
    assert frozenset({"tp", "sp", "ep", "etp", "dp", "pp"}) in used
    assert frozenset({"tp"}) not in used, "routers need sequence parallelism"


def test_large_degrees_are_brought_down() -> None:
    found = names(config(layout__tp=4, layout__sp=True, layout__pp=8, model__num_layers=32, data__seq_length=64))
    assert any(axes.get("pp") == "8" for axes in found.values())
    assert any(axes.get("tp") == "2" and axes.get("pp") == "4" for axes in found.values())


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"layout__stage_layers": (1, 3, 2, 2)}, "1+3+2+2"),
        ({"layout__first_stage_layers": 1, "model__num_layers": 7}, "1+3+2+2"),
        ({"layout__last_stage_layers": 2}, "3+2+2+1"),
    ],
)
def test_uneven_stages_stay_uneven(layout: dict[str, object], expected: str) -> None:
    found = names(config(layout__pp=4, **layout))
    assert expected in {axes.get("stage_layers") for axes in found.values()}


@pytest.mark.parametrize(
    ("text", "trial"),
    [
        ("tp2cp2", Trial(tp=2, cp=2)),
        ("pp4", Trial(pp=4)),
        (
            "tp2sp-pp2vpp2-cp2ulysses-dp1-mbs4",
            Trial(tp=2, sp=True, pp=2, vpp=2, cp=2, cp_comm="ulysses", micro_batch_size=4),
        ),
        ("dp2weights", Trial(dp=2, shard="weights")),
        ("tp2sp-pp1-cp1-dp4-ep4etp2-mbs2", Trial(tp=2, sp=True, dp=4, ep=4, etp=2, micro_batch_size=2)),
        ("tp1-pp2[1+3]-cp1-dp2-mbs2", Trial(pp=2, dp=2, micro_batch_size=2, stage_shares=(1, 3))),
        ("cp2allgather", Trial(cp=2)),
    ],
)
def test_names_are_understood(text: str, trial: Trial) -> None:
    assert parse_trials(text, config().layout, 16) == [trial]


def test_the_names_of_reports_name_their_layouts() -> None:
    user = config(layout__tp=2, layout__sp=True, layout__pp=4, layout__stage_layers=(1, 3, 2, 2))
    trials = DerivedTrials(user, 8).derived()
    small = shrink(user, trials).config
    for trial in trials:
        name = prepared(trial, small).name
        (parsed,) = parse_trials(name, user.layout, 8)
        assert prepared(parsed, small).name == name


def test_cp_comm_is_the_users_where_no_other_is_named() -> None:
    user = config(layout__cp=2, layout__cp_comm="ulysses")
    assert [trial.cp_comm for trial in parse_trials("cp2,cp2allgather,tp2", user.layout, 8)] == [
        "ulysses",
        "allgather",
        "allgather",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "tp2x",
        "sp",
        "tp2tp4",
        "tp16",
        "vpp2",
        "tp0",
        "dp2mbs0",
        "pp2[1+2+3]",
        " , ",
        "-",
    ],
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with refuses(ConfigError):
        parse_trials(text, config().layout, 8)


def test_all_wrong_names_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_trials("tp2,tp16,what", config().layout, 8)
    assert len(str(caught.value).splitlines()) == 2


def test_a_layout_that_the_model_cannot_take_is_refused_with_the_reason() -> None:
    user = config(model__num_query_groups=1)
    trials = parse_trials("tp2", user.layout, 8)
    with refuses(ConfigError, "model.num_query_groups=1"):
        prepared(trials[0], shrink(user, trials).config)


@pytest.mark.parametrize(
    ("num_layers", "shares", "layers"),
    [
        (4, None, None),
        (8, (1, 3, 2, 2), (1, 3, 2, 2)),
        (4, (10, 12), (1, 3)),
        (4, (12, 10), (3, 1)),
        (2, (1, 3), (1, 1)),
        (6, (5, 5, 1), (3, 2, 1)),
    ],
)
def test_layers_are_shared(num_layers: int, shares: tuple[int, ...] | None, layers: tuple[int, ...] | None) -> None:
    assert shared_layers(num_layers, shares) == layers
