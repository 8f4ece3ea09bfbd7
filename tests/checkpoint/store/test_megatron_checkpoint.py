"""Where checkpoints of Megatron-LM and Megatron-Bridge lie."""

import os
from pathlib import Path
from random import Random

import pytest

from mtrain.base.errors import DataError
from mtrain.checkpoint.store.megatron_checkpoint import check_run_config, megatron_folder
from tests.config.samples import config
from tests.messages import refuses


def iteration(folder: Path) -> Path:
    """Creates an iteration's folder with a list of tensors."""
    folder.mkdir()
    (folder / ".metadata").touch()
    return folder


@pytest.mark.parametrize(("latest", "name"), [("100\n", "iter_0000100"), ("release", "release")])
def test_an_iteration_is_found_by_its_folder_and_by_the_latest(tmp_path: Path, latest: str, name: str) -> None:
    folder = iteration(tmp_path / name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    assert megatron_folder(folder) == folder
    assert megatron_folder(tmp_path) == folder


def test_our_own_and_others_are_left_alone(tmp_path: Path) -> None:
    own = iteration(tmp_path / "step_00000010")
    (own / "mtrain.json").touch()
    assert megatron_folder(own) is None
    assert megatron_folder(tmp_path) is None
    assert megatron_folder(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("latest", "folder", "fact"),
    [
        ("../../etc", "iter_0000100", "release"),
        ("200", "iter_0000100", "iter_0000200"),
        ("300", "iter_0000300/mp_rank_00", "iter_0000300"),
    ],
)
def test_what_cannot_be_taken_is_refused(tmp_path: Path, latest: str, folder: str, fact: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with refuses(DataError, fact):
        megatron_folder(tmp_path)


@pytest.mark.parametrize("named", ["above", "iteration", "rank"])
@pytest.mark.parametrize("has_latest", [True, False])
def test_one_file_per_rank_is_refused_whichever_ranks_are_here(tmp_path: Path, named: str, has_latest: bool) -> None:
    """Names are mp_rank_TP, mp_rank_TP_PP, mp_rank_TP_PP_EP or mp_rank_TP_EP; a node has those of its own ranks."""
    random = Random(named)
    for number in range(8):
        axes = random.sample([random.randrange(100) for _ in range(3)], random.randrange(1, 4))
        name = f"mp_rank_{axes[0]:02d}{''.join(f'_{axis:03d}' for axis in axes[1:])}"
        place = tmp_path / f"{number}"
        rank = place / "iter_0000300" / name
        rank.mkdir(parents=True)
        (rank / "model_optim_rng.pt").touch()
        if has_latest:
            (place / "latest_checkpointed_iteration.txt").write_text("300")
        with pytest.raises(DataError) as refused:
            megatron_folder({"above": place, "iteration": rank.parent, "rank": rank}[named])
        assert str(refused.value).startswith(f"{rank.parent} has one pickled file per rank"), name


def test_without_a_latest_an_iteration_has_to_be_named(tmp_path: Path) -> None:
    iteration(tmp_path / "iter_0000100")
    iteration(tmp_path / "iter_0000200")
    with refuses(DataError, "iter_0000200"):
        megatron_folder(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "40 GiB"])
@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "run_config.yaml"])
def test_what_is_no_text_is_refused_and_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "40 GiB":
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 40 * 2**30)
    else:
        (os.mkfifo if kind == "pipe" else Path.mkdir)(tmp_path / name)

    def look() -> None:
        megatron_folder(tmp_path)
        check_run_config(tmp_path, config().model)

    with refuses(DataError, name):
        look()


@pytest.mark.parametrize("value", ["1" + "0" * 400, "[1]", "!!timestamp x", "[" * 5000, "x"])
def test_a_run_config_of_nonsense_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "run_config.yaml").write_text(f"model: {{num_layers: {value}}}\n")
    with refuses(DataError, "run_config.yaml"):
        check_run_config(tmp_path, config().model)
