"""Nothing of others on a user's terminal: each verb in a new interpreter, whose standard error has our notes alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.config.samples import config
from tests.hf.folders import save
from tests.paths import ROOT
from tests.training.sampling.test_generate import word_tokenizer

OURS = ("note: ", "[rank 0] note: ")
EXPERTS = "model.experts={num_experts: 4, top_k: 2, ffn_hidden_size: 16}"
LATENTS = "model.mla={kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}"
RUN = ["{folder}/run.yaml", "run.dir={folder}/run"]
VERBS = {
    "experts and depths": ["launch", "local", "-n", "2", *RUN, EXPERTS, "model.mtp_depths=1", "layout.ep=2"],
    "latent attention": ["launch", "local", "-n", "2", *RUN, LATENTS, "model.num_query_groups=null", "layout.tp=2"],
    "one rank": ["train", *RUN, EXPERTS, "model.mtp_depths=1"],
    "check": ["check", *RUN, "--world-size", "1"],
    "import": ["convert", "import", "--hf", "{folder}/hf", "--out", "{folder}/ours"],
    "generate": ["generate", "{folder}/hf", "--prompt", "a"],
    "verify": ["verify", "parity", *RUN, "--layouts", "tp2", "--steps", "1"],
}
BY_DAY = ("one rank",)
"""Verb that imports what each rank of several would."""


@pytest.mark.parametrize(
    "name", [each if each in BY_DAY else pytest.param(each, marks=pytest.mark.nightly) for each in VERBS]
)
def test_a_verb_says_nothing_that_is_not_ours(tmp_path: Path, name: str) -> None:
    few = {"model__num_layers": 2, "train__num_steps": 2, "train__global_batch_size": 2, "model__vocab_size": 64}
    (tmp_path / "run.yaml").write_text(config(**few).model_dump_json(exclude_unset=True))
    save("llama", tmp_path / "hf", torch.float32)
    word_tokenizer(tmp_path / "hf")
    arguments = [each.replace("{folder}", str(tmp_path)) for each in VERBS[name]]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith(OURS)] == []
    assert "warning" not in done.stdout.lower()
