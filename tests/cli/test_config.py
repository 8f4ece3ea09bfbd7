"""`mtrain config`: the meaning of keys, origins of values, and the schema for editors."""

import json
from pathlib import Path

import yaml

import mtrain
from mtrain.config.keys import editor_schema
from mtrain.hf.configuration import load_config
from tests.cli.command_line import call
from tests.config.samples import content
from tests.config.yaml_files import write
from tests.paths import CONFIGS

SCHEMA = CONFIGS / "mtrain.schema.json"


def test_a_key_is_explained() -> None:
    code, text = call("config", "optimizer.clip_grad")
    assert code == 0, text
    assert text == (
        "optimizer.clip_grad\n  number >= 0; default 1.0\n"
        "  Largest global norm of the gradient, after division by the denominator; 0 turns clipping off.\n\n"
    )
    code, text = call("config", "num_steps")
    assert text.startswith("train.num_steps\n  integer >= 0, steps; default 0\n")
    code, text = call("config", "layout")
    assert "  layout.cp_comm " in text
    code, text = call("config", "max_grad_norm")
    assert code == 2
    assert "max_grad_norm: there is no such key; it is optimizer.clip_grad here" in text


def test_a_configuration_is_printed_with_the_origin_of_each_value(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", content(optimizer={"lr": 1e-3, "warmup_ratio": 0.2}, data__packing=None))
    code, text = call("config", path, "layout.tp=2")
    assert code == 0, text
    lines = {line.strip().partition(":")[0]: line.rpartition("  # ")[2] for line in text.splitlines()}
    assert lines["tp"] == "the command line"
    assert lines["num_steps"].startswith(f"{path}:")
    assert lines["warmup_steps"] == "follows from other keys"
    assert lines["clip_grad"] == "default"
    (tmp_path / "again.yaml").write_text(text)
    assert load_config([tmp_path / "again.yaml"]) == load_config([path], ["layout.tp=2"])
    code, text = call("config", path, "train.num_steps=-1")
    assert code == 2
    assert "train.num_steps" in text


def test_editors_get_the_schema_that_the_code_has() -> None:
    """Written anew by `mtrain config --schema > configs/mtrain.schema.json`."""
    code, text = call("config", "--schema")
    assert code == 0
    assert SCHEMA.read_text() == text


def test_every_shipped_file_fits_the_schema() -> None:
    """Checks keys alone: each is known, and described."""
    schema = editor_schema()

    def properties(part: dict[str, object]) -> list[dict[str, dict[str, object]]]:
        found = []
        for each in (part, *part.get("anyOf", []), *part.get("oneOf", [])):  # type: ignore[misc]
            if "$ref" in each:
                each = schema["$defs"][each["$ref"].rpartition("/")[2]]
            if each is not part and "oneOf" in each:
                found += properties(each)
            if "properties" in each:
                found.append(each["properties"])
        return found

    def check(value: object, part: dict[str, object], place: str) -> None:
        choices = properties(part)
        if not isinstance(value, dict) or not choices:
            return
        for key, inner in value.items():
            fitting = [each[key] for each in choices if key in each]
            assert fitting, f"{place}.{key}"
            check(inner, fitting[0], f"{place}.{key}")

    for path in CONFIGS.glob("*/*.yaml"):
        check(yaml.safe_load(path.read_text()), schema, path.name)
    assert schema["$defs"]["TrainSection"]["properties"]["num_steps"]["description"].startswith("Number of optimizer")
    assert "required" not in json.dumps(schema["$defs"]["ModelSection"].get("required") or "")


def test_the_version_is_printed() -> None:
    code, text = call("--version")
    assert (code, text) == (0, f"mtrain {mtrain.__version__}\n")


def test_a_name_of_the_hub_says_how_to_download_it(tmp_path: Path) -> None:
    hub = "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B"
    given = content(model={"hf": "Qwen/Qwen3-8B"})
    code, text = call("config", write(tmp_path / "run.yaml", given))
    assert code == 2
    assert "model.hf=Qwen/Qwen3-8B has no config.json; name a Hugging Face folder" in text
    assert hub in text
    records = {"kind": "sft", "seq_length": 8, "train": [{"path": "a.jsonl"}], "tokenizer": "Qwen/Qwen3-8B"}
    code, text = call("check", write(tmp_path / "sft.yaml", content(data=records)), "--world-size", 1)
    assert code == 3
    assert hub in text
    code, text = call("config", write(tmp_path / "run.yaml", content(model={"hf": str(tmp_path)})))
    assert "hf download" not in text
