"""Measures what every family of Hugging Face can do here: `python -m tests.hf.support` writes docs/reference/models.md,
and its short form in README.md.

`python -m tests.hf.support llama qwen3` prints the rows of some families. `--columns packed,LoRA` measures these cells
alone, of all families or of the named ones, and writes them into the page, whose other cells stay. Each cell is an
outcome: small random models of transformers are converted, trained and asked, and transformers judges them.
"""

from __future__ import annotations

import argparse
import datetime
import filecmp
import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from mtrain.arch import num_parameters
from mtrain.arch.layout import Layout
from mtrain.base.errors import ConfigError, DataError
from mtrain.config import Config
from mtrain.config.schema.adapter import DELTA_NET_PARTS, JOINED, LATENT_PARTS, LoraSection, Target
from mtrain.config.schema.model import ModelSection
from mtrain.convert.adapters import export_adapter
from mtrain.convert.exporting import export_hf
from mtrain.convert.importing import import_hf
from mtrain.convert.verifying import random_tokens
from mtrain.hf.configuration import load_config
from mtrain.hf.schema.peft import tensors
from mtrain.hf.schema.registry import FAMILIES, family_of_run
from mtrain.training.sampling.params import SamplingParams
from mtrain.verify.hf import verify_hf
from mtrain.verify.parity import Request, verify_parity
from tests.core.adapters import peft_ranks
from tests.hf import hf_ranks
from tests.hf.folders import save
from tests.paths import DOCS, ROOT
from tests.pool import Pool
from tests.training.sampling import sampling_ranks

COMMAND = "python -m tests.hf.support"
PAGE = DOCS / "reference" / "models.md"
_WINDOWS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_WIDE_HEADS = {
    **_ALTERNATING,
    "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 2} for layer in (1, 3)},
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_FULL = {"layer_types": ["full_attention"] * 4}
_MAMBA = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
_DENSE_FIRST = {"mlp_layer_types": ["dense", *["sparse"] * 3]}


@dataclass(frozen=True)
class Model:
    """Small model of a family that two ranks of every axis can divide."""

    folder: str
    """Name in tests/hf/folders.py."""
    changes: Mapping[str, Any]
    """Fields of its config.json that differ; all have four layers and two groups of queries or more."""
    example: str
    """File in configs/model."""


MODELS: dict[str, Model] = {
    "llama": Model("llama", {}, "llama3_8b"),
    "mistral": Model("mistral", {}, "mistral_7b"),
    "mistral3": Model("mistral3", {}, "mistral_small_24b"),
    "ministral3": Model("ministral3", {}, "ministral3_8b"),
    "mistral3/ministral3": Model("ministral3-images", {}, "ministral3_8b"),
    "qwen2": Model("qwen2", _FULL, "qwen2.5_7b"),
    "qwen3": Model("qwen3", _FULL, "qwen3_8b"),
    "qwen3_vl": Model("qwen3-vl-images", {}, "qwen3_8b"),
    "phi3": Model("phi3", {}, "phi4_14b"),
    "smollm3": Model("smollm3", {"no_rope_layers": [1, 0] * 2, **_FULL}, "smollm3_3b"),
    "mixtral": Model("mixtral", {"num_local_experts": 4}, "mixtral_8x7b"),
    "qwen2_moe": Model("qwen2-moe", {"num_experts": 4, **_FULL}, "qwen2_57b_a14b"),
    "qwen3_moe": Model("qwen3-moe", {"num_experts": 4}, "qwen3_30b_a3b"),
    "qwen3_vl_moe": Model("qwen3-vl-moe-images", {"num_experts": 4}, "qwen3_30b_a3b"),
    "qwen3_next": Model("qwen3-next", {"num_experts": 4, **_HYBRID}, "qwen3_next_80b_a3b"),
    "qwen3_5_text": Model("qwen3.5", _HYBRID, "qwen3.5_9b"),
    "qwen3_5": Model("qwen3.5-images", _HYBRID, "qwen3.5_9b"),
    "qwen3_5_moe_text": Model("qwen3.5-moe", {"num_experts": 4, **_HYBRID}, "qwen3.5_35b_a3b"),
    "qwen3_5_moe": Model("qwen3.5-moe-images", {"num_experts": 4, **_HYBRID}, "qwen3.5_35b_a3b"),
    "deepseek_v3": Model("deepseek", {}, "deepseek_v3"),
    "kimi_k2": Model("deepseek", {}, "kimi_k2"),
    "kimi_k25": Model("kimi-k2.5", {}, "kimi_k2"),
    "glm4_moe_lite": Model("glm4-moe-lite", _DENSE_FIRST, "glm4.7_flash"),
    "gemma3_text": Model("gemma3", _WINDOWS, "gemma3_4b"),
    "gemma3": Model("gemma3-images", _WINDOWS, "gemma3_4b"),
    "gemma4_text": Model("gemma4", _WIDE_HEADS, "gemma4_31b"),
    "gemma4": Model("gemma4-images", {"num_experts": 4, **_WIDE_HEADS}, "gemma4_26b_a4b"),
    "gpt_oss": Model("gpt-oss", {"num_local_experts": 4, **_ALTERNATING}, "gpt_oss_20b"),
    "olmo2": Model("olmo2", {}, "olmo2_7b"),
    "olmo3": Model("olmo3", _WINDOWS, "olmo3_7b"),
    "minimax_m2": Model("minimax", {"num_local_experts": 4}, "minimax_m2"),
    "glm4_moe": Model("glm4-moe", {}, "glm4.5_air"),
    "nemotron_h": Model("nemotron-h", {"n_routed_experts": 4, **_MAMBA}, "nemotron3_nano_30b_a3b"),
}
LAYOUTS = {
    "tp": "tp2sp",
    "pp": "pp2",
    "vpp": "pp2vpp2",
    "cp gather": "cp2",
    "cp Ulysses": "cp2ulysses",
    "cp ring": "cp2ring",
    "dp": "dp2",
    "ep": "dp2ep2",
}
"""Column -> layout whose steps are compared with those of transformers."""
TRAININGS: dict[str, Callable[[ModelSection], str]] = {
    "documents": lambda model: "data.isolate_documents=true",
    "packed": lambda model: "data={kind: mock, seq_length: 16, isolate_documents: true, packing: {}}",
    "LoRA": lambda model: f"adapter={{rank: 4, targets: [{', '.join(sorted(model.query_projections))}, proj]}}",
}
"""Column -> key of a run whose steps are compared with the float64 reference, on layouts of two axes."""
TOLERANCE = 1e-4
BOUNDS = {"logits": 1e-5, "PEFT": 1e-5, "worst": TOLERANCE}
"""Column with a deviation -> what it must be below."""
RUN = """
run: {dir: RUN}
model: {hf: HF}
train: {global_batch_size: 4, micro_batch_size: 2, num_steps: 6, precision: fp32, device: cpu}
optimizer: {lr: 1.0e-2, schedule: cosine, warmup_steps: 1, clip_grad: 0.1}
data: {kind: mock, seq_length: 16}
"""
_IMAGES = re.compile(r"vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|mm_projector|visual\.")
_PARTS: tuple[Target, ...] = (
    *(*JOINED, "q_proj", "k_proj", "v_proj", *LATENT_PARTS, *DELTA_NET_PARTS, "in_proj_zxbcdt"),
    *("proj", "out_proj", "gate_proj", "up_proj", "fc2", "experts"),
)
PROMPTS, NUM_NEW = [[5, 9, 30, 7], [11], [40, 3, 3, 17, 21]], 4
COLUMNS = ("convert", "logits", "generate", "plan", *LAYOUTS, *TRAININGS, "PEFT", "worst")


def row_of(family: str, pool: Pool, columns: Collection[str] = COLUMNS) -> dict[str, str]:
    """Measures one family; returns column -> what the page says, of these columns (a step's with all of `LAYOUTS`)."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, given = Path(name) / "hf", MODELS[family]
        changes = {"num_hidden_layers": 4} | _groups(given) | dict(given.changes)
        model = save(given.folder, folder, torch.float32, **changes)
        _rename(folder, family)
        if not {"convert", "logits"}.isdisjoint(columns):
            found["convert"] = _mark(_comes_back(folder))
            found["logits"] = f"{_logits_deviation(folder, model, pool):.0e}"
        if "generate" in columns:
            found["generate"] = _mark(_answers(folder, pool) == _their_answers(model))
        (Path(name) / "run.yaml").write_text(RUN.replace("RUN", f"{name}/run").replace("HF", str(folder)))
        config = configured(name)
        if "plan" in columns:
            found["plan"] = _mark(num_parameters(config.model) == _num_learning(model))
        if not {*LAYOUTS, "worst"}.isdisjoint(columns):
            deviations = dict(_steps(config, pool))
            found |= {
                column: "-" if value is None else _mark(value < TOLERANCE) for column, value in deviations.items()
            }
            found["worst"] = f"{max(value for value in deviations.values() if value is not None):.0e}"
        for column in (each for each in TRAININGS if each in columns):
            found[column] = _mark(_trains(configured(name, TRAININGS[column](config.model)), pool))
        if "PEFT" in columns:
            found["PEFT"] = f"{_peft_deviation(config, model, pool):.0e}"
    return found


def configured(folder: str, *overrides: str) -> Config:
    """Reads the run of a measurement, with further keys."""
    return load_config([Path(folder) / "run.yaml"], [*overrides])


def _groups(model: Model) -> dict[str, int]:
    has_latents = model.folder in ("deepseek", "kimi-k2.5", "glm4-moe-lite")
    return {} if has_latents else {"num_key_value_heads": 2}


def _rename(folder: Path, family: str) -> None:
    """Puts another name of the same function into config.json."""
    said = json.loads((folder / "config.json").read_text())
    if said["model_type"] != FAMILIES[family].model_type:
        (folder / "config.json").write_text(json.dumps(said | {"model_type": family}, indent=2))


def _mark(is_sound: bool) -> str:
    return "✓" if is_sound else "✗"


def _comes_back(folder: Path) -> bool:
    ours, back = folder.with_name("ours"), folder.with_name("back")
    import_hf(folder, ours, None, num_workers=1)
    export_hf(ours, back, None, None, num_workers=1)
    names = {path.name for path in folder.iterdir()}
    same, *others = filecmp.cmpfiles(folder, back, names, shallow=False)
    return set(same) == names == {path.name for path in back.iterdir()} and others == [[], []]


def _logits_deviation(folder: Path, model: Any, pool: Pool) -> float:
    """Returns the largest deviation of a logit, relative to the largest logit."""
    with torch.no_grad():
        expected = model(random_tokens(model.config.get_text_config().vocab_size)).logits.numpy()
    found = pool.run(hf_ranks.logits, Layout(), folder.with_name("ours"))[0]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _answers(folder: Path, pool: Pool) -> list[list[int]]:
    keys = ["train={global_batch_size: 4, num_steps: 1, precision: fp32, device: cpu}", "optimizer={lr: 1.0}"]
    config = load_config(
        [], [f"model.hf={folder}", f"run.dir={folder}/run", *keys, "data={kind: mock, seq_length: 32}"]
    )
    greedy = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0)
    (of_model,) = pool.run(sampling_ranks.answers, Layout(), [config], PROMPTS, [greedy], 64)[0]
    return [each.token_ids for each in of_model[0]]


def _their_answers(model: Any) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def _num_learning(model: Any) -> int:
    """Counts the parameters of the text; biases of the choice of experts are buffers."""
    return sum(each.numel() for name, each in model.named_parameters() if not _IMAGES.search(name))


def _steps(config: Config, pool: Pool) -> Iterator[tuple[str, float | None]]:
    """Yields, by column, the worst deviation of the losses and norms of two steps; None where the model has no such
    axis."""
    for column, layout in LAYOUTS.items():
        if column == "ep" and config.model.experts is None:
            yield column, None
            continue
        try:
            report = verify_hf(config, Request(layout, 2, 4, None, COMMAND), lambda line: None, pool)
        except ConfigError as refusal:
            print(f"{config.model.hf}: {column}: {refusal}", file=sys.stderr)
            yield column, None
            continue
        (found,) = report.layouts
        assert found.error is None, found.error
        yield column, max(each.value for each in found.deviations)


def _trains(config: Config, pool: Pool) -> bool:
    layouts = "tp2sp,cp2" if config.model.experts is None else "tp2sp,dp2ep2"
    report = verify_parity(config, Request(layouts, 1, 4, None, COMMAND), lambda line: None, pool)
    return report.passed


def _peft_deviation(config: Config, model: Any, pool: Pool) -> float:
    """Returns the largest deviation of a logit, relative to the largest: a run with drawn adapters on two ranks,
    PEFT on transformers' model with the exported adapter, and a run that starts from it."""
    place = Path(config.run.dir)
    targets = f"adapter.targets=[{', '.join(adapted_by_peft(config))}]"
    given, again = (
        configured(str(place.parent), targets, f"run.dir={place}_{name}", *more)
        for name, more in (("adapted", ()), ("again", (f"adapter.path={place}_peft",)))
    )
    tokens = random_tokens(config.model.vocab_size)
    ranks = pool.run(peft_ranks.saved, Layout(tp=2, sp=True), given, tokens.numpy())
    ours = np.concatenate([rank.logits for rank in ranks], axis=-1)[..., : config.model.vocab_size]
    export_adapter(Path(given.run.dir), place.with_name("run_peft"), None)
    (back,) = pool.run(peft_ranks.started, Layout(), again, tokens.numpy())
    with torch.no_grad():
        plain = model(tokens).logits.numpy()
        theirs = peft.PeftModel.from_pretrained(model, place.with_name("run_peft")).eval()(tokens).logits.numpy()
    largest = float(np.abs(theirs).max())
    assert np.abs(theirs - plain).max() > 1e-2 * largest, "the adapter does something"
    return max(float(np.abs(found[..., : theirs.shape[-1]] - theirs).max()) / largest for found in (ours, back))


def adapted_by_peft(config: Config) -> list[Target]:
    """Returns the targets in layers for which PEFT has a form in the family of a run's model."""
    family, found = family_of_run(config), []
    for part in _PARTS:
        try:
            is_formed = bool([*tensors(family, config.model, LoraSection(targets=(part,)))])
        except DataError:
            continue
        if is_formed:
            found.append(part)
    return found


_TEXT = """# Models

<!-- Written by `{command}`; a nightly test repeats it. Change the program, not this page. -->

What was proved of each family on CPU ranks, with small random models of transformers {version}
({date} or later):

- **convert**: an import and its export are the same folder, byte for byte.
- **logits**: largest deviation of a logit from transformers', relative to the largest logit, in float32.
- **generate**: greedy answers are the token ids of transformers.
- **plan**: `mtrain plan` counts as many parameters as the model has.
- **tp** (with sp) to **ep**: two steps of training on two ranks of that axis have transformers' losses and gradient
  norms within {tolerance:g} (`mtrain verify hf`); a dash: refused by name (no experts; a ring with windows or latents).
  **worst** is the largest deviation.
- **documents**, **packed**, **LoRA**: a step with documents kept apart in a row, with several samples packed into a
  row, or with adapters, is that of the reference in float64 on two layouts, every gradient and weight (`mtrain verify
  parity`).
- **PEFT**: largest deviation of a logit, relative to the largest, between a run with adapters under tp2, `peft` on
  transformers' model with the exported folder, and a run that starts from that folder. Adapted is every projection in
  the layers, and the experts, for which PEFT has a form ([LoRA](../training/lora.md)): not experts of Gemma 4 and
  Nemotron and Mamba-2's `out_proj`, which are exported merged.

A question mark: not measured yet.

Gradients and weights of every family under combined axes are in [Parity](../proof/parity.md); what of a file is refused
by name is in [Hugging Face](../weights/conversion.md).

"""


def page(rows: Mapping[str, Mapping[str, str]], version: str, date: str) -> str:
    """Makes the page, in Markdown; a cell that was never measured is a question mark.

    Args:
        rows: Family -> column -> what the page says.
        version: Version of transformers that has judged.
        date: Day of the measurement.
    """
    lines = [f"| `model_type` | configs/model | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for family, row in rows.items():
        cells = " | ".join(row.get(column, "?") for column in COLUMNS)
        lines.append(f"| `{family}` | {MODELS[family].example} | {cells} |")
    return _TEXT.format(command=COMMAND, tolerance=TOLERANCE, version=version, date=date) + "\n".join(lines) + "\n"


GROUPS: dict[str, tuple[str, ...]] = {
    "Llama 3": ("llama",),
    "Mistral, Qwen2.5, Qwen3, Phi-4, SmolLM3, OLMo-2, OLMo-3": (
        *("mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "olmo3"),
    ),
    "Qwen3-VL (text and images)": ("qwen3_vl", "qwen3_vl_moe"),
    "Gemma 3, Gemma 4 31B and 26B-A4B, Mistral Small, Ministral 3 (text and images)": (
        *("gemma3_text", "gemma3", "gemma4_text", "gemma4", "mistral3", "ministral3", "mistral3/ministral3"),
    ),
    "Mixtral, Qwen2-MoE, Qwen3-MoE, GPT-OSS, MiniMax-M2, GLM-4.5 to 4.7": (
        *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "minimax_m2", "glm4_moe"),
    ),
    "DeepSeek-V3, Kimi-K2 and K2.5, GLM-4.7-Flash (latent attention)": (
        *("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
    ),
    "Qwen3-Next, Qwen3.5 and 3.6 (gated delta nets; 3.5 and 3.6 with images)": (
        *("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
    ),
    "Nemotron-H, Nemotron 3 Nano (Mamba-2)": ("nemotron_h",),
}
"""Row of README -> its families."""
SHORT: dict[str, tuple[str, ...]] = {
    "pretrain, SFT": tuple(each for each in COLUMNS if each not in ("generate", "LoRA", "PEFT")),
    "LoRA, PEFT": ("LoRA", "PEFT"),
}
"""Column of README -> the columns of the page that it stands for."""
WITH_OBJECTIVES = ("llama",)
"""Families of the models in tests/parity/objectives."""
README = ROOT / "README.md"
_SHORT_TABLE = re.compile(r"(?<=\n## Models\n\n)(\|.*\n)+")


def short_table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Makes the table of README, in Markdown: a group has what all its families have.

    Args:
        rows: Family -> column -> what the page says.
    """
    lines = [f"| | {' | '.join(SHORT)} | preference, RL |", "|---" * (2 + len(SHORT)) + "|"]
    for name, families in GROUPS.items():
        cells = [
            "✓"
            if all(_is_proved(column, rows[family].get(column, "?")) for column in columns for family in families)
            else "-"
            for columns in SHORT.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {'✓' if {*families} <= {*WITH_OBJECTIVES} else '○'} |")
    return "\n".join(lines) + "\n"


def _is_proved(column: str, said: str) -> bool:
    """Says whether a cell of the page shows that the family can do this, or has no such axis."""
    return float(said) < BOUNDS[column] if column in BOUNDS and said != "?" else said in ("✓", "-")


def write_pages(rows: Mapping[str, Mapping[str, str]], version: str, date: str) -> None:
    """Writes the page, and its short form into README."""
    PAGE.write_text(page(rows, version, date))
    README.write_text(_SHORT_TABLE.sub(lambda _: short_table(rows), README.read_text()))


def rows_of_page() -> dict[str, dict[str, str]]:
    """Reads the table of the page."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    (_, _, *columns), *rows = lines
    return {line[0].strip("`"): dict(zip(columns, line[2:], strict=True)) for line in rows}


def origin_of_page() -> tuple[str, str]:
    """Returns the version of transformers and the date that the page names."""
    ((version, date),) = re.findall(r"transformers (\S+)\n\((\S+) or later\)", PAGE.read_text())
    return version, date


def main() -> None:
    """Prints the rows of the named families, or writes the page of all, or the named columns into it."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("families", nargs="*", choices=[[], *FAMILIES])
    parser.add_argument("--columns", type=lambda text: text.split(","))
    given = parser.parse_args()
    if unknown := {*(given.columns or ())} - {*COLUMNS}:
        parser.error(f"--columns={','.join(sorted(unknown))} is no column; name some of {', '.join(COLUMNS)}")
    pool, rows = Pool(), {} if given.columns is None else rows_of_page()
    version, date = transformers.__version__, datetime.date.today().isoformat()
    if rows and (there := origin_of_page()):
        assert there[0] == version, f"the page is of transformers {there[0]}: measure all of it anew"
        date = there[1]
    for family in given.families or FAMILIES:
        measured = row_of(family, pool, given.columns or COLUMNS)
        rows[family] = rows.get(family, {}) | measured
        print(family, measured, flush=True)
        if given.columns:  # at once, as a long measurement may be cut
            write_pages(rows, version, date)
    if not given.columns and not given.families:
        write_pages(rows, version, date)


if __name__ == "__main__":
    main()
