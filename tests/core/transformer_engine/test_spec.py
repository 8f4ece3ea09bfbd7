"""TransformerEngine's layers have our parameters: names, shapes, marks, places in checkpoints, initial weights.

So a run may change its backend, and everything that goes through the parameters (optimizer, norms of gradients,
checkpoints, conversion) is the same for both. Its own Python builds the modules; nothing compiled is needed for that.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

ALLOWED = [
    "llama3.2_1b",
    "llama3_70b",
    "llama3_8b",
    "mistral_7b",
    "mistral_small_24b",
    "phi4_14b",
    "quickstart",
    "qwen2.5_7b",
    "qwen3_32b",
    "qwen3_8b",
    "smollm3_3b",
    "tiny",
]
REFUSED = [
    "deepseek_v3",
    "gemma3_4b",
    "gemma4_26b_a4b",
    "gemma4_31b",
    "glm4.5_air",
    "glm4.7_flash",
    "gpt_oss_20b",
    "kimi_k2",
    "minimax_m2",
    "ministral3_8b",
    "mixtral_8x7b",
    "nemotron3_nano_30b_a3b",
    "olmo2_7b",
    "olmo3_7b",
    "qwen2_57b_a14b",
    "qwen3.5_35b_a3b",
    "qwen3.5_9b",
    "qwen3_30b_a3b",
    "qwen3_next_80b_a3b",
]
BY_EXPERTS = ("te", "te-experts")
"""Candidates of models with experts."""


@pytest.mark.parametrize(  # tied tables, biases, norms of heads; the others are of the same parts
    "models",
    [["llama3.2_1b", "qwen2.5_7b", "qwen3_8b"], pytest.param(ALLOWED, marks=pytest.mark.nightly)],
    ids=["each part", "all"],
)
def test_layers_of_transformer_engine_have_the_parameters_of_ours(
    transformer_engine_wheel: Path, models: list[str]
) -> None:
    program = "tests.core.transformer_engine.spec_program"
    command = [sys.executable, "-m", program, str(transformer_engine_wheel), *models]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differences"] == []
    assert max(found["verified"].values()) < 1, "errors from the reference, in units of the tolerance"
    assert {name.split(maxsplit=1)[1] for name in found["verified"]} == {
        "te layer 0, window 9, documents",
        "te layer 1, documents",
        *(f"{each} layer 0" for each in BY_EXPERTS),
        *(f"{each} layer 1, experts" for each in BY_EXPERTS),
        *(f"{each} layer 0, latent attention" for each in BY_EXPERTS),
        *(f"{each} layer 1, latent attention, experts" for each in BY_EXPERTS),
        *(f"{each} layer 0, latent attention, documents" for each in BY_EXPERTS),
        *(f"{each} layer 1, latent attention, experts, documents" for each in BY_EXPERTS),
    }
    assert found["padding"] == 0
    assert found["recipes"] == {
        "tensorwise": "Float8CurrentScaling HYBRID",
        "blockwise": "Float8BlockScaling HYBRID",
        "mxfp8": "MXFP8BlockScaling HYBRID",
    }
    assert (found["compared"], found["refused"]) == (models, REFUSED)
