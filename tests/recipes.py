"""Shipped configurations, each completed to a whole run."""

from __future__ import annotations

import re
from pathlib import Path

from mtrain.config import Config
from mtrain.hf.configuration import load_config
from tests.paths import CONFIGS, DOCS

STARTS = sorted((CONFIGS / "start").glob("*.yaml"))
PAGES = [page for page in sorted((DOCS / "recipes").glob("*.md")) if page.name != "index.md"]
_MODELS = CONFIGS / "model"
_PRETRAIN = CONFIGS / "run" / "pretrain.yaml"


def _layout(name: str) -> Path:
    return CONFIGS / "layout" / f"{name}.yaml"


def _run(name: str) -> Path:
    return CONFIGS / "run" / f"{name}.yaml"


RUNS: dict[str, tuple[Path, ...]] = {
    "finetune": (_MODELS / "llama3.2_1b.yaml", _layout("cp2"), _run("finetune")),
    "finetune_128k": (_MODELS / "llama3_8b.yaml", _layout("tp4cp8"), _run("finetune_128k")),
    "lora": (_MODELS / "qwen2.5_7b.yaml", _layout("tp2sp"), _run("lora")),
    "pretrain": (_MODELS / "llama3_8b.yaml", _layout("tp2sp"), _PRETRAIN),
    "quickstart_finetune": (_MODELS / "quickstart.yaml", _layout("tp2pp2"), _run("quickstart_finetune")),
    "quickstart_pretrain": (_MODELS / "quickstart.yaml", _layout("tp2pp2"), _run("quickstart_pretrain")),
}
"""Files of each run, by its name; `verify` refuses preference.yaml and reward_model.yaml, with a message."""
MODELS = {path.stem: (path, _layout("cp2"), _PRETRAIN) for path in sorted(_MODELS.glob("*.yaml"))}
"""Models on two ranks that share a row, where attention differs most."""
NAMES = [
    *(path.stem for path in STARTS),
    *(f"recipe {page.stem}" for page in PAGES),
    *(f"run {name}" for name in RUNS),
    *(f"model {name}" for name in MODELS),
]


def shipped(name: str, folder: Path) -> Config:
    """Loads the configuration with one of NAMES.

    Args:
        name: Name of a start, a recipe, a run or a model.
        folder: Folder in which the recipe of a page is written as a file.
    """
    kind, _, rest = name.partition(" ")
    if kind == "run":
        return load_config(RUNS[rest])
    if kind == "model":
        return load_config(MODELS[rest])
    if kind == "recipe":
        text = (DOCS / "recipes" / f"{rest}.md").read_text()
        (recipe,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        (folder / "recipe.yaml").write_text(recipe)
        (model,) = re.findall(r"^mtrain check (\S+) recipe\.yaml", text, re.MULTILINE)
        return load_config([CONFIGS.parent / model, folder / "recipe.yaml"])
    (model,) = re.findall(r"mtrain launch slurm (\S+) ", (CONFIGS / "start" / f"{name}.yaml").read_text())
    return load_config([CONFIGS.parent / model, CONFIGS / "start" / f"{name}.yaml"])
