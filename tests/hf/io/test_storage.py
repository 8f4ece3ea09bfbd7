"""However a model is stored, it is read with the function of transformers, or the folder is refused by name."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.base.errors import DataError
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.hf.io.block_scaled import plain_config
from mtrain.hf.io.source import FolderTensors, HfSource, open_source
from mtrain.hf.schema.description import described_model
from mtrain.hf.schema.registry import FAMILIES, family_of
from mtrain.hf.schema.table import stream_tensor
from tests.fault_table import Notice
from tests.hf import judges
from tests.hf.folders import save
from tests.hf.stored import CONTENTS, FILES, store
from tests.messages import refuses

Way = tuple[str, str]
"""Content of the files, and kind of the files."""


def stored(name: str, ways: Iterable[Way], place: Path) -> dict[Way, Path]:
    """Stores a model in each way, with a config.json that all versions read alike."""
    # with several groups transformers 4 sets the scores of others to 0, which is above a negative bias
    one_group: dict[str, Any] = {"n_group": 1, "topk_group": 1} if name == "deepseek" else {}
    save(name, place / "saved", max_shard_size="1GB", **one_group)
    state = load_file(place / "saved" / "model.safetensors")
    config = json.loads((place / "saved" / "config.json").read_text())
    config = family_of(config).for_all_versions(config)
    found = {way: place / f"{name}-{number}" for number, way in enumerate(ways)}
    for way, folder in found.items():
        store(folder, state, config, *way)
    return found


def as_usual(source: HfSource, folder: Path) -> None:
    """Writes the weights that were read, whole and plain, under the usual names of the family."""
    tensors = FolderTensors(source)
    state = {}
    for tensor, filled in FAMILIES[source.family.model_type].table(source.model).tensors():
        state[tensor.name] = torch.cat(list(stream_tensor(tensor, filled.key, tensors.read))).view(tensor.shape)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(plain_config(source.folder.config)))


def outcome(folder: Path, *judged: torch.Tensor | None) -> str:
    """Describes how a folder is read here, and by transformers; all its versions have to agree where it is read
    here."""
    known = [logits for logits in judged if logits is not None]
    try:
        source = open_source(folder)
    except DataError as fault:
        named = "" if str(folder) in str(fault) else " without a name"
        return ("refused here" if known else "refused") + named
    usual = folder.with_name(f"{folder.name}-usual")
    as_usual(source, usual)
    ours = judges.answer(str(usual))
    assert ours is not None, folder
    for logits in known:
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5, msg=lambda text: f"{folder}: {text}")
    return "equal" if known else "read here"


EVERY_CONTENT: list[Way] = [(content, "whole") for content in CONTENTS]
EVERY_FILE: list[Way] = [("as saved", files) for files in FILES]


@pytest.mark.parametrize(
    ("name", "ways", "expected"),
    [
        ("qwen3-moe", EVERY_CONTENT, {"equal": 16, "refused here": 3, "refused": 2}),
        ("llama-tied", EVERY_FILE, {"equal": 9, "refused here": 4, "refused": 2}),
    ],
)
def test_what_is_read_is_what_transformers_reads(
    name: str, ways: list[Way], expected: dict[str, int], tmp_path: Path
) -> None:
    found = {way: outcome(folder, judges.answer(str(folder))) for way, folder in stored(name, ways, tmp_path).items()}
    assert Counter(found.values()) == expected, found


CONTRADICTIONS: list[Way] = [
    ("as saved", "whole with other shards"),
    ("as saved", "with an adapter"),
    ("as saved", "another one named"),
    ("as saved", "a variant alone"),
    ("as saved", "a tensor in two shards"),
    ("as saved", "a tensor that the index leaves out"),
    ("another head", "whole"),
    ("packed in U32", "whole"),
    ("quantised while it loads", "whole"),
]


@pytest.mark.fault(
    "folders",
    "a folder of Hugging Face in which two things say what the weights are, or in a format that is not read",
    happens="refused; both are named, or the format and what is read in its place",
    exit_code=3,
)
@pytest.mark.parametrize("way", CONTRADICTIONS, ids=" ".join)
def test_what_says_two_things_is_refused_by_name(way: Way, tmp_path: Path, notice: Notice) -> None:
    name = "llama-tied" if way[0] == "another head" else "llama"
    (folder,) = stored(name, [way], tmp_path).values()
    with notice, refuses(DataError) as refused:
        open_source(folder)
    assert refused.value.exit_code == notice.exit_code


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("llama-tied", "saved from the base model"),
        ("llama-tied", "head twice"),
        ("qwen3-moe", "fused experts of the base model"),
        ("mixtral", "fused experts"),
        ("deepseek", "fused experts"),
        ("qwen3", "nothing quantised"),
        ("qwen3", "use_qk_norm"),
    ],
)
@pytest.mark.parametrize("files", ["whole", "sharded"])
def test_names_and_fields_come_back_as_they_were(name: str, content: str, files: str, tmp_path: Path) -> None:
    (folder,) = stored(name, [(content, files)], tmp_path).values()
    import_hf(folder, tmp_path / "ours", None, num_workers=1)
    export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
    theirs = {path.name: path.read_bytes() for path in folder.iterdir()}
    back = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    if files == "sharded":  # its stated size is its own
        said, again = (json.loads(each.pop("model.safetensors.index.json")) for each in (theirs, back))
        assert said["weight_map"] == again["weight_map"]
    assert theirs == back


def test_an_export_of_a_run_has_names_that_transformers_4_reads(tmp_path: Path) -> None:
    """A cast is no copy: its result has the names of a run's own export."""
    fused, tied = (
        next(iter(stored(name, [(content, "whole")], tmp_path / name).values()))
        for name, content in (("qwen3-moe", "fused experts"), ("llama-tied", "saved from the base model"))
    )
    for folder, expected in ((fused, "model.layers.0.mlp.experts.0.up_proj.weight"), (tied, "layers.0.mlp.up_proj")):
        import_hf(folder, folder / "ours", None, num_workers=1)
        export_hf(folder / "ours", folder / "back", folder, None, num_workers=1)
        names = load_file(folder / "back" / "model.safetensors")
        assert any(name.startswith(expected) for name in names), sorted(names)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek", {"first_k_dense_replace": 3}, "refused here"),
        ("deepseek", {"num_experts_per_tok": 1}, "refused here"),
        ("deepseek", {"num_experts_per_tok": 1, "norm_topk_prob": False}, "equal"),
        ("deepseek", {"num_hidden_layers": 1, "first_k_dense_replace": 0}, "equal"),
        ("qwen3-moe", {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": False}, "equal"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, "refused here"),
        ("qwen3-moe", {"decoder_sparse_step": 9}, "refused here"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, "equal"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 3}, "equal"),
        ("gpt-oss", {"layer_types": ["full_attention"] * 3}, "equal"),
    ],
    ids=str,
)
def test_settings_at_their_ends_are_computed_or_refused(
    name: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    save(name, folder, max_shard_size="1GB", **changes)
    assert outcome(folder, judges.answer(str(folder))) == expected
    if expected == "equal":
        import_hf(folder, tmp_path / "ours", None, num_workers=1)
        export_hf(tmp_path / "ours", tmp_path / "back", None, None, num_workers=1)
        assert all((tmp_path / "back" / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


def test_a_folder_is_described_by_the_weights_that_count(tmp_path: Path) -> None:
    """Configured depths exist or not as the whole file says, not as an index next to it says."""
    save("deepseek", tmp_path, max_shard_size="1GB")
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {"model.layers.3.enorm.weight": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert described_model(tmp_path).mtp_depths == 0
    assert open_source(tmp_path).model.mtp_depths == 0


NIGHT = ("llama-tied", "qwen3-moe", "mixtral")
NIGHT_WAYS = list(
    dict.fromkeys(
        [
            *[(content, files) for content in CONTENTS for files in ("whole",)],
            *[(content, files) for content in ("as saved", "saved from the base model") for files in FILES],
        ]
    )
)


@pytest.mark.nightly  # by day: every content and every kind of file once, with transformers 5 as the oracle
@pytest.mark.parametrize("name", NIGHT)
def test_both_versions_compute_what_is_read(name: str, transformers_4: list[Path], tmp_path: Path) -> None:
    folders = stored(name, NIGHT_WAYS, tmp_path)
    command = [sys.executable, "-m", "tests.hf.judges", str(tmp_path / "4.pt"), *map(str, folders.values())]
    subprocess.run(command, check=True, env=judges.environment_of_4(transformers_4))
    older = torch.load(tmp_path / "4.pt")
    assert older["version"].startswith("4.57.")
    found = {
        way: outcome(folder, judges.answer(str(folder)), older["answers"][str(folder)])
        for way, folder in folders.items()
    }
    assert Counter(found.values()) == BY_NIGHT[name], found


BY_NIGHT = {
    "llama-tied": {"equal": 31, "refused here": 13, "refused": 5},
    "qwen3-moe": {"equal": 32, "refused here": 11, "refused": 6},
    "mixtral": {"equal": 31, "refused here": 12, "refused": 6},
}
