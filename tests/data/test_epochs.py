"""Epochs as steps: just enough of them to hold every sample so often, counted by hand over the steps of the loader."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mtrain.base.errors import ConfigError
from mtrain.config import Config
from mtrain.config.load import config_yaml
from mtrain.data.loader import StepLoader
from mtrain.data.sources import with_num_steps
from mtrain.hf.configuration import load_config
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.messages import refuses

LETTERS = "abcdefghij"
NUM_SAMPLES = 23


@pytest.fixture
def config_of(
    tmp_path: Path, write_jsonl: Callable[[Sequence[dict[str, Any]]], Path], word_tokenizer: Path
) -> Callable[..., Config]:
    """Writes 23 samples of 3 to 8 positions, for rows of 8."""
    answers = [" ".join(LETTERS[(i // 10**n) % 10] for n in range(2 + i % 6)) for i in range(NUM_SAMPLES)]
    path = write_jsonl([{"prompt": "a", "response": answer} for answer in answers])

    def config(packing: dict[str, Any] | None = None, size: int = 4, num_epochs: float = 2, **optimizer: Any) -> Config:
        data = {"kind": "sft", "train": [{"path": str(path)}], "tokenizer": str(word_tokenizer), "packing": packing}
        given = content(data={"seq_length": 8, **data}, optimizer={"lr": 1e-3, **optimizer})
        given["train"] = {"global_batch_size": size, "num_epochs": num_epochs, "precision": "fp32"}
        return load_config([write(tmp_path / "config.yaml", given)])

    return config


def samples_of(config: Config, num_steps: int) -> Counter[int]:
    """Counts how often the first steps hold each sample of the file."""
    loader = StepLoader(config, 0, 1)
    numbers = [int(number) for step in range(num_steps) for number in loader.steps.samples(step).numbers]
    return Counter(loader.stream.locate(number).index for number in numbers)


PACKINGS: dict[str, dict[str, Any] | None] = {
    "rows of one sample": None,
    "packed, counting samples": {"batch": "sequences"},
    "packed rows of windows beyond an epoch": {"batch": "rows"},
    "packed rows of windows of an epoch": {"batch": "rows", "window": NUM_SAMPLES},
    "packed rows of smaller windows": {"batch": "rows", "window": 5},
}


@pytest.mark.parametrize("name", PACKINGS)
def test_epochs_are_the_fewest_steps_that_hold_every_sample_so_often(
    name: str, config_of: Callable[..., Config]
) -> None:
    config = with_num_steps(config_of(PACKINGS[name], size=3))
    num_steps = config.train.num_steps
    whole, shorter = samples_of(config, num_steps), samples_of(config, num_steps - 1)
    assert min(whole[index] for index in range(NUM_SAMPLES)) == 2
    assert min(shorter[index] for index in range(NUM_SAMPLES)) == 1


@pytest.mark.parametrize("num_epochs", [0.3, 1.5])
@pytest.mark.parametrize("name", PACKINGS)
def test_a_part_of_an_epoch_is_the_fewest_steps_that_hold_as_many_samples(
    name: str, num_epochs: float, config_of: Callable[..., Config]
) -> None:
    config, wanted = with_num_steps(config_of(PACKINGS[name], 1, num_epochs)), num_epochs * NUM_SAMPLES
    num_steps = config.train.num_steps
    assert samples_of(config, num_steps - 1).total() < wanted <= samples_of(config, num_steps).total()


def texts_of(config: Config, num_ranks: int) -> Counter[tuple[int, ...]]:
    """Counts the answers in the losses of the data-parallel ranks of a whole run, by their tokens."""
    found: Counter[tuple[int, ...]] = Counter()
    for rank in range(num_ranks):
        loader = StepLoader(config, rank, num_ranks)
        for step in range(config.train.num_steps):
            for batch in loader.batches(step):
                labels, weights = batch.labels.flatten().tolist(), batch.weights["main"].flatten().tolist()
                starts = [place for place, each in enumerate(batch.positions.flatten().tolist()) if each == 0]
                for first, end in pairwise([*starts, len(labels)]):
                    found[tuple(labels[place] for place in range(first, end) if weights[place] > 0)] += 1
    del found[()]  # padding
    return found


@pytest.mark.parametrize("name", ["rows of one sample", "packed rows of windows beyond an epoch"])
def test_two_ranks_read_every_sample_so_often_and_together_what_one_reads(
    name: str, config_of: Callable[..., Config]
) -> None:
    config = with_num_steps(config_of(PACKINGS[name]))
    found = texts_of(config, 2)
    assert len(found) == NUM_SAMPLES
    assert min(found.values()) == 2
    assert found == texts_of(config, 1)


def test_an_epoch_is_recorded_as_steps_and_repeats_from_its_record(
    config_of: Callable[..., Config], tmp_path: Path
) -> None:
    config = with_num_steps(config_of({"batch": "rows"}, warmup_ratio=0.3))
    steps = config.train.num_steps
    assert config.train.num_epochs is None
    assert config.optimizer.warmup_ratio is None
    assert config.optimizer.warmup_steps == -(-3 * steps // 10)
    assert config.data.packing is not None
    assert config.data.packing.window == NUM_SAMPLES
    (tmp_path / "again.yaml").write_text(config_yaml(config))
    assert load_config([tmp_path / "again.yaml"]) == config
    assert with_num_steps(config) is config


def test_a_share_of_the_steps_is_rounded_up_as_it_is_written(config_of: Callable[..., Config], tmp_path: Path) -> None:
    """0.07 x 100 is 7.000000000000001 in floating point, and its ceiling 8."""
    path = write(tmp_path / "config.yaml", content(train__num_steps=100, optimizer={"lr": 1e-3, "warmup_ratio": 0.07}))
    assert load_config([path]).optimizer.warmup_steps == 7
    assert load_config([path], ["optimizer.warmup_ratio=0.071"]).optimizer.warmup_steps == 8
    assert load_config([path], ["optimizer.warmup_ratio=0.995"]).optimizer.warmup_steps == 99


def test_data_without_an_end_have_no_epochs(tmp_path: Path) -> None:
    train = {"global_batch_size": 4, "num_epochs": 2}
    path = write(tmp_path / "config.yaml", content(data={"kind": "mock", "seq_length": 8}, train=train))
    with refuses(ConfigError, "train.num_epochs=2", "mock"):
        with_num_steps(load_config([path]))
