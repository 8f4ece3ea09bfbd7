"""Small copies reach every bound of the user's model: a fault that acts only there is found."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config import Config
from mtrain.verify.core.ranks import Pool
from tests.verify.parity.checks import NUM_SAMPLES, check, expert_config, rich_config
from tests.verify.planted.ranks import FaultyPool
from tests.verify.planted.reach_ranks import FAULTS

DELTA_NET: dict[str, Any] = {
    "model__delta_net": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8},
}
MAMBA: dict[str, Any] = {
    "model__mamba": {"num_heads": 4, "head_dim": 8, "num_groups": 2, "state_dim": 8, "step_min": 1e-4},
    "model__layer_pattern": "M-",
}
EPSILONS: dict[str, Any] = {"model__norm_epsilon": 1e-6}
LATENTS: dict[str, Any] = {
    "model__num_query_groups": None,
    "model__mla": {
        "q_lora_rank": 384,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "norm_epsilon": 1e-6,
    },
}
LLAMA: dict[str, Any] = {"model__rope": {"scaling": "llama3", "factor": 8.0, "base": 1e7}}
YARN: dict[str, Any] = {"model__rope": {"scaling": "yarn", "factor": 4.0, "base": 1e7, "original_max_positions": 1024}}
WINDOWS: dict[str, Any] = {
    "model__rope": {"base": 1e6, "local_base": 1e5},
    "model__sliding_window": 32,
    "model__global_attention_every": 2,
}
FINETUNING: dict[str, Any] = {"optimizer__lr": 1e-6, "optimizer__weight_decay": 0.01}
SEVEN: dict[str, Any] = {"model__activation": "swiglu_clamped"}
PPO: dict[str, Any] = {"loss__function": "ppo", "loss__side_terms": {}}
ROUTERS: dict[str, Any] = {"loss__router": {"z_coefficient": 1e-6, "sequence_balance_coefficient": 1e-6}}
CASES: dict[str, list[dict[str, Any]]] = {
    "state forgotten at a chunk": [DELTA_NET, MAMBA],
    "state leaked at a chunk": [DELTA_NET, MAMBA],
    "any step of mamba": [MAMBA],
    "temperatures ignored": [PPO, {**PPO, "data__packing": {}}],
    "second block of logits": [{"loss__options": {"label_smoothing": 0.1}}],
    "first block of the norm": [{}],
    "length of keys": [DELTA_NET],
    "no clamp": [SEVEN],
    "softcap": [{"model__logit_softcap": 30.0}],
    "norm epsilon": [EPSILONS, EPSILONS | {"model__norm": "layernorm"}],
    "latent epsilon": [LATENTS],
    "lower band": [LLAMA],
    "upper band": [LLAMA],
    "fast band": [YARN],
    "slow band": [YARN],
    "base": [{"model__rope": {"base": 1e7}}],
    "local base": [WINDOWS],
    "optimizer epsilon": [FINETUNING, FINETUNING | {"optimizer__kind": "muon"}],
    "decay": [FINETUNING],
    "first moment": [FINETUNING],
    "rollout cap": [PPO | {"loss__options": {"rollout_cap": 10.0}}],
    "dual clip": [PPO | {"loss__options": {"dual_clip": 10.0}}],
}
"""Fault -> keys of the users in whose small copies it acts."""
OF_EXPERTS: dict[str, list[dict[str, Any]]] = {
    "negative scores as 0": [{}],
    "no clamp": [SEVEN],
    "router z": [ROUTERS],
    "router balance": [ROUTERS],
}
ROWS = [
    *((name, rich_config(**changes)) for name, rows in CASES.items() for changes in rows),
    *((name, expert_config(**changes)) for name, rows in OF_EXPERTS.items() for changes in rows),
]
USERS = [user for number, (_, user) in enumerate(ROWS) if user not in [other for _, other in ROWS[:number]]]
BY_USER = [(user, [name for name, other in ROWS if other == user]) for user in USERS]
"""Each user once, who is checked without a fault, with all faults that act in that small copy."""


def test_every_fault_has_a_row() -> None:
    assert {name for name, _ in ROWS} == {*FAULTS}


KNOWN = [{name for _, names in BY_USER[:number] for name in names} for number in range(len(BY_USER))]
"""Faults of the users before each; a user with no other fault waits for the night."""


@pytest.mark.parametrize(
    ("user", "names"),
    [
        pytest.param(user, names, marks=[pytest.mark.nightly] if known >= {*names} else [], id=", ".join(names))
        for (user, names), known in zip(BY_USER, KNOWN, strict=True)
    ],
)
def test_what_acts_at_a_bound_is_found(pool: Pool, user: Config, names: list[str]) -> None:
    steps = {name: 2 if name == "first moment" else 1 for name in names}
    sound = check(pool, user, f"mbs{NUM_SAMPLES}", num_steps=max(steps.values()))
    assert sound.passed, [(layout.first_failure(), layout.error, layout.trace) for layout in sound.layouts]
    for name, num_steps in steps.items():
        faulty: Any = FaultyPool(pool, name)
        report = check(faulty, user, f"mbs{NUM_SAMPLES}", num_steps=num_steps)
        assert all(layout.error is None for layout in report.layouts), report.layouts[0].trace
        assert not report.passed, name
