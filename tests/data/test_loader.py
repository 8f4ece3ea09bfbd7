"""Batches: the same on any number of ranks and from any step."""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.core.batch.batch import Microbatch
from mtrain.core.batch.collate import loss_terms
from mtrain.data.formats.megatron_indexed import writing_corpus
from mtrain.data.loader import StepLoader
from tests.fault_table import Notice
from tests.messages import refuses

MakeConfig = Callable[..., Config]
WriteCorpus = Callable[[str, Sequence[Sequence[int]]], str]
WriteJsonl = Callable[[Sequence[dict[str, Any]]], Path]

SIDE = {"z": {"aggregation": "seq-mean-token-mean"}, "all": {"aggregation": "sum"}}


@pytest.fixture(params=["mock", "indexed", "isolated", "sft"])
def config(
    request: pytest.FixtureRequest,
    make_config: MakeConfig,
    write_corpus: WriteCorpus,
    write_jsonl: WriteJsonl,
    word_tokenizer: Path,
) -> Config:
    """Builds a configuration with training and validation data of each kind and three loss terms; experts have padded
    rows."""
    letters = "abcdefghij"
    model: dict[str, Any] = {}
    match request.param:
        case "mock":
            data: dict[str, Any] = {"kind": "mock"}
        case "sft":
            samples = [{"prompt": a, "response": f"{b} {a}"} for a in letters for b in letters[:3]]
            data = {"kind": "sft", "train": [{"path": str(write_jsonl(samples))}], "tokenizer": str(word_tokenizer)}
            data["split"] = [0.6, 0.4, 0.0]
            model = {"experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}}
        case _:
            prefixes = [
                write_corpus(name, [list(range(base, base + 5 + number)) for number in range(9)])
                for name, base in [("a", 100), ("b", 500)]
            ]
            data = {
                "train": [{"path": prefixes[0], "weight": 0.7}, {"path": prefixes[1], "weight": 0.3}],
                "valid": [{"path": prefix} for prefix in prefixes],
                "isolate_documents": request.param == "isolated",
            }
    return make_config(data, loss={"side_terms": SIDE}, model=model)


def fields(batch: Microbatch) -> dict[str, Tensor]:
    found = {"tokens": batch.tokens, "labels": batch.labels, "positions": batch.positions}
    found |= {f"weights.{term}": value for term, value in batch.weights.items()}
    found |= {f"shares.{term}": value for term, value in batch.denominator_weights.items()}
    more = {"document_starts": batch.document_starts, "is_padding": batch.is_padding}
    return found | {name: value for name, value in more.items() if value is not None}


def joined(batches: Sequence[Microbatch]) -> dict[str, Tensor]:
    """Joins the rows of all microbatches, by field."""
    rows = [fields(batch) for batch in batches]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def global_batch(config: Config, dp: int, micro_batch_size: int, step: int) -> dict[str, Tensor]:
    """Returns what all ranks read, in the order of slots."""
    changed = config.train.model_copy(update={"micro_batch_size": micro_batch_size})
    ranks = [StepLoader(config.model_copy(update={"train": changed}), rank, dp).batches(step) for rank in range(dp)]
    return joined([ranks[rank][number] for number in range(len(ranks[0])) for rank in range(dp)])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(1, 1), (1, 8), (2, 2), (4, 1), (8, 1)])
def test_the_global_batch_does_not_depend_on_the_ranks(config: Config, dp: int, micro_batch_size: int) -> None:
    for step in (0, 5):
        assert_same(global_batch(config, dp, micro_batch_size, step), global_batch(config, 1, 2, step))


def test_rows_for_a_gpu_are_pinned_where_they_are_read_ahead(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, pin = [], torch.Tensor.pin_memory

    def pinned(tensor: Tensor) -> Tensor:
        threads.append(threading.current_thread().name)
        return pin(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    config = config.model_copy(update={"data": config.data.model_copy(update={"prefetch_steps": 1})})
    with StepLoader(config, 0, 2).iterate(0, pinned=True) as batches:
        number = sum(len(batch.tensors().keys() - {("document_starts",)}) for batch in next(batches))
        assert len(threads) >= number > 0
    assert set(threads) == {"prefetch"}
    threads.clear()
    with StepLoader(config, 0, 2).iterate(0) as batches:
        next(batches)
    assert threads == []


@pytest.mark.parametrize("depth", [0, 2])
def test_resuming_at_a_step_is_starting_at_it(config: Config, depth: int) -> None:
    config = config.model_copy(update={"data": config.data.model_copy(update={"prefetch_steps": depth})})
    with StepLoader(config, 1, 2).iterate(0) as batches:
        through = [joined(next(batches)) for _ in range(12)]
    longer = config.model_copy(update={"train": config.train.model_copy(update={"num_steps": 10**6})})
    with StepLoader(longer, 1, 2).iterate(7) as batches:
        for step in range(7, 12):
            assert_same(joined(next(batches)), through[step])


def test_the_seed_decides_the_order(config: Config) -> None:
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 4321})})
    assert not torch.equal(
        joined(StepLoader(config, 0, 1).batches(0))["tokens"], joined(StepLoader(other, 0, 1).batches(0))["tokens"]
    )


def test_the_seed_of_the_data_takes_the_place_of_the_runs(config: Config) -> None:
    def tokens(train_seed: int, data_seed: int | None) -> torch.Tensor:
        sections = {
            "train": config.train.model_copy(update={"seed": train_seed}),
            "data": config.data.model_copy(update={"seed": data_seed}),
        }
        return joined(StepLoader(config.model_copy(update=sections), 0, 1).batches(0))["tokens"]

    assert torch.equal(tokens(4321, None), tokens(1234, 4321))
    assert torch.equal(tokens(1234, None), tokens(4321, 1234))
    assert not torch.equal(tokens(4321, 1234), tokens(4321, None))


def test_every_term_has_weights_and_shares_of_its_own(config: Config) -> None:
    for step in (0, 3):
        rows = global_batch(config, 2, 2, step)
        counted = int((rows["weights.main"] > 0).sum())
        assert counted > 8
        assert rows["shares.main"].sum() == counted
        assert rows["shares.z"].sum() == 8
        assert rows["weights.z"].double().sum() == pytest.approx(8, rel=1e-6)
        assert rows["shares.all"].sum() == 1
        assert rows["shares.all"][0, 0] == 1


def test_rows_are_complete(config: Config) -> None:
    for batch in StepLoader(config, 0, 1).batches(0):
        assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, 8)
        assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64
        assert (batch.document_starts is not None) == config.data.isolate_documents
        if batch.document_starts is not None:
            assert batch.document_starts.dtype == torch.int32
            assert torch.equal(batch.positions, torch.arange(8) - batch.document_starts)
        assert all(weights.dtype == torch.float32 for weights in batch.weights.values())
        assert all(shares.dtype == torch.float64 for shares in batch.denominator_weights.values())


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(1, 8), (2, 2), (4, 1)])
def test_validation_meets_every_sample_once_on_any_ranks(config: Config, dp: int, micro_batch_size: int) -> None:
    train = config.train.model_copy(update={"micro_batch_size": micro_batch_size})
    config = config.model_copy(update={"train": train})
    passes, sets = [], []
    for rank in range(dp):
        held_out = StepLoader(config, rank, dp).held_out()
        assert held_out is not None
        sets.append(held_out)
        passes.append(list(held_out.batches()))
    assert {(len(own), len(own[0])) for own in passes} == {(sets[0].num_passes, 8 // (dp * micro_batch_size))}
    found = joined(
        [passes[rank][p][m] for p in range(len(passes[0])) for m in range(len(passes[0][0])) for rank in range(dp)]
    )
    samples = sets[0].num_samples
    assert [float(found[f"shares.{name}"].sum()) for name in ("z", "all")] == [samples, 1]
    assert found["shares.all"][0, 0] == 1
    for name, value in found.items():
        if name.startswith(("weights", "shares")):
            assert not value[samples:].any()
    whole = StepLoader(
        config.model_copy(update={"train": train.model_copy(update={"micro_batch_size": 1})}), 0, 1
    ).held_out()
    assert whole is not None
    assert_same(found, joined([batch for own in whole.batches() for batch in own]))


def test_rows_that_fill_up_are_not_sequences_even_where_empty_ones_count(
    make_config: MakeConfig, write_jsonl: WriteJsonl, word_tokenizer: Path
) -> None:
    path = str(
        write_jsonl([{"prompt": "a", "response": "b", "weight": 0}] * 3 + [{"prompt": "a", "response": "b"}] * 2)
    )
    held_out = StepLoader(
        make_config(
            {
                "kind": "sft",
                "train": [{"path": path}],
                "valid": [{"path": path}],
                "tokenizer": str(word_tokenizer),
                "seq_length": 2,
            },
            loss={"aggregation": "seq-mean-token-mean", "empty_sequences": "include"},
        ),
        0,
        1,
    ).held_out()
    assert held_out is not None
    assert joined([batch for own in held_out.batches() for batch in own])["shares.main"].sum() == 2


def test_padding_is_what_holds_no_text_and_whole_rows_that_fill_up(
    make_config: MakeConfig, write_jsonl: WriteJsonl, word_tokenizer: Path
) -> None:
    path = str(write_jsonl([{"prompt": "a b", "response": "c d e"}]))
    data = {"kind": "sft", "train": [{"path": path}], "valid": [{"path": path}], "tokenizer": str(word_tokenizer)}
    experts = {"experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}}
    held_out = StepLoader(make_config(data, model=experts), 0, 1).held_out()
    assert held_out is not None
    rows = joined([batch for own in held_out.batches() for batch in own])
    text = [False] * 6 + [True] * 2  # the prompt is text too, though it is not in the loss
    assert rows["is_padding"].tolist() == [text] + [[True] * 8] * 7
    held_out = StepLoader(make_config(data), 0, 1).held_out()
    assert held_out is not None
    assert all(batch.is_padding is None for own in held_out.batches() for batch in own)


def test_validation_can_be_cut_short(make_config: MakeConfig, write_corpus: WriteCorpus) -> None:
    prefix = write_corpus("a", [list(range(100))])
    section = {"train": [{"path": prefix}], "valid": [{"path": prefix}]}
    held_out = StepLoader(make_config(section, valid={"max_samples": 3}), 0, 1).held_out()
    assert held_out is not None
    assert held_out.num_samples == 3
    (only,) = held_out.batches()
    assert joined(only)["weights.main"].sum() == 3 * 8


def test_a_split_keeps_training_and_validation_apart(make_config: MakeConfig, write_corpus: WriteCorpus) -> None:
    prefix = write_corpus("a", [[number] * 9 for number in range(20)])
    loader = StepLoader(make_config({"train": [{"path": prefix}], "split": [0.8, 0.1, 0.1]}), 0, 1)
    trained = {int(token) for step in range(20) for batch in loader.batches(step) for token in batch.tokens.flatten()}
    parts = []
    for part in ("valid", "test"):
        held_out = loader.held_out(part)
        assert held_out is not None
        rows = joined([batch for own in held_out.batches() for batch in own])
        parts.append(set(rows["labels"][rows["weights.main"] > 0].tolist()))
    assert (trained, parts) == (set(range(16)), [{16, 17}, {18, 19}])


def test_blends_deal_out_samples_by_weight(make_config: MakeConfig, write_corpus: WriteCorpus) -> None:
    sources = [
        {"path": write_corpus("a", [[1] * 50]), "weight": 3},
        {"path": write_corpus("b", [[2] * 90]), "weight": 1},
    ]
    rows = global_batch(make_config({"train": sources}), 2, 2, 11)
    assert sorted(rows["tokens"][:, 0].tolist()) == [1] * 6 + [2] * 2


def test_no_validation_set_is_none(make_config: MakeConfig, write_corpus: WriteCorpus) -> None:
    prefix = write_corpus("a", [list(range(100))])
    assert StepLoader(make_config({"train": [{"path": prefix}]}), 0, 1).held_out() is None
    assert StepLoader(make_config({"train": [{"path": prefix}], "split": [1.0, 0.0, 0.0]}), 0, 1).held_out() is None


def test_the_fingerprint_follows_the_data_and_not_the_ranks(make_config: MakeConfig, write_corpus: WriteCorpus) -> None:
    config = make_config({"train": [{"path": write_corpus("a", [list(range(100))])}]})
    before = StepLoader(config, 0, 1).fingerprint
    assert StepLoader(config, 1, 2).fingerprint == before
    write_corpus("a", [list(range(101))])
    assert StepLoader(config, 0, 1).fingerprint != before


def test_a_tokenizer_larger_than_the_model_is_taken_and_an_id_beyond_it_refused(
    make_config: MakeConfig, write_jsonl: WriteJsonl, word_tokenizer: Path
) -> None:
    last = tokenizers.Tokenizer.from_file(str(word_tokenizer / "tokenizer.json")).id_to_token(17)
    for response, is_beyond in (("b", False), (last, True)):
        path = write_jsonl([{"prompt": "a", "response": response}])
        data = {"kind": "sft", "train": [{"path": str(path)}], "tokenizer": str(word_tokenizer)}
        config = make_config(data, model={"vocab_size": 17})
        with refuses(DataError, "model.vocab_size") if is_beyond else nullcontext():
            StepLoader(config, 0, 1)


def test_a_bad_token_comes_up_in_the_training_loop(make_config: MakeConfig, tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    with writing_corpus(prefix, 1000) as writer:
        writer.add(torch.full((9,), 999).numpy())
    config = make_config({"train": [{"path": prefix}]}, model={"vocab_size": 999})
    with StepLoader(config, 0, 1).iterate(0) as batches, refuses(DataError, "999"):
        next(batches)


@pytest.mark.fault(
    "input",
    "a global batch that does not divide over the data-parallel ranks",
    happens="refused with both numbers",
    exit_code=2,
)
def test_a_batch_that_does_not_divide_is_refused(make_config: MakeConfig, notice: Notice) -> None:
    with (
        notice,
        refuses(ConfigError, "global_batch_size=8") as refusal,
    ):
        StepLoader(make_config({"kind": "mock"}), 0, 3)
    assert refusal.value.exit_code == notice.exit_code


def test_the_main_term_has_the_name_that_the_losses_use(make_config: MakeConfig) -> None:
    assert list(loss_terms(make_config({"kind": "mock"}, loss={"side_terms": SIDE}).loss)) == ["main", "z", "all"]
