"""The verifier's reference against the oracle of the tests: two independent implementations of the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain.config import Config
from mtrain.config.megatron_fields import PROVEN
from mtrain.verify.core.samples import HardBatch
from mtrain.verify.reference.model.shapes import shapes_of
from mtrain.verify.reference.model.transformer import Transformer
from mtrain.verify.reference.objective import evaluated
from mtrain.verify.reference.text import rows_of
from tests.config.samples import config
from tests.oracle.loss import Sequence, Teacher
from tests.oracle.model import parameter_shapes, random_parameters
from tests.oracle.run import oracle_steps

SMALL: dict[str, Any] = {
    "model__num_layers": 2,
    "model__hidden_size": 32,
    "model__ffn_hidden_size": 24,
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__vocab_size": 41,
    "train__global_batch_size": 6,
    "data__seq_length": 16,
}
EXPERTS = {"num_experts": 8, "top_k": 4, "ffn_hidden_size": 12, "first_dense_layers": 1}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
YARN = {"scaling": "yarn", "factor": 4.0, "original_max_positions": 16}
SIDES = {
    "z": {"function": "z_loss", "coefficient": 0.1, "aggregation": "seq-mean-token-mean"},
    "entropy": {"function": "entropy", "coefficient": -0.1, "aggregation": "sum"},
    "teacher": {
        "function": "distillation",
        "options": {"direction": "reverse", "temperature": 2.0},
        "aggregation": "seq-mean-token-sum-norm",
        "norm_length": 7,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "isolated, tied, biases, layernorm, gelu": {
        "data__isolate_documents": True,
        "model__tied_embeddings": True,
        "model__linear_bias": True,
        "model__norm": "layernorm",
        "model__activation": "gelu",
        "loss__aggregation": "seq-mean-token-sqrt",
    },
    "windows, local base, sandwich, sinks": {
        "model__sliding_window": 5,
        "model__global_attention_every": 2,
        "model__rope": {"base": 500.0, "local_base": 100.0, "scaling": "linear", "factor": 4.0},
        "model__sandwich_norm": True,
        "model__attention_sinks": True,
        "model__zero_centered_norm": True,
        "model__scale_embeddings": True,
        "model__activation": "geglu_tanh",
        "model__qk_norm": True,
        "model__query_scalar": 5.0,
        "data__isolate_documents": True,
    },
    "norms behind, full-width norms of queries and keys": {
        "model__post_norm": True,
        "model__qk_norm": True,
        "model__qk_norm_width": "full",
        "model__zero_centered_norm": True,
        "model__head_dim": 6,
        "model__mtp_depths": 1,
    },
    "windows by a base of their own beside yarn": {
        "model__sliding_window": 5,
        "model__global_attention_every": 2,
        "model__rope": {**YARN, "base": 500.0, "local_base": 100.0},
    },
    "every second layer without positions": {"model__megatron": {"no_rope_freq": 2}},
    "marked layers without positions": {"model__megatron": {"no_rope_freq": [1, 0]}, "model__sliding_window": 6},
    "llama3, clamped": {
        "model__rope": {"scaling": "llama3", "factor": 8.0, "original_max_positions": 32},
        "model__activation": "swiglu_clamped",
        "loss__aggregation": "seq-mean-token-sum",
        "loss__empty_sequences": "include",
    },
    "latents, yarn": {
        "model__num_query_groups": None,
        "model__mla": MLA,
        "model__rope": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "interleaved": True},
        "loss__options": {"label_smoothing": 0.1},
    },
    "experts by softmax": {
        "model__rope": YARN,
        "model__experts": EXPERTS,
        "loss__router": {"z_coefficient": 0.1, "sequence_balance_coefficient": 0.2},
    },
    "experts by sigmoid in groups, two tokens ahead": {
        "model__experts": {
            **EXPERTS,
            "score": "sigmoid",
            "num_groups": 4,
            "group_top_k": 2,
            "shared_ffn_hidden_size": 10,
            "scaling_factor": 2.5,
            "router_bias": True,
            "expert_bias": True,
            "bias_update_rate": 0.01,
        },
        "model__mtp_depths": 2,
        "data__isolate_documents": True,
        "loss__router": {"sequence_balance_coefficient": 0.2},
    },
    "side terms": {"loss__side_terms": SIDES, "loss__teacher": {"checkpoint": "runs/teacher"}},
}


def reference(user: Config, number: int, seed: int) -> Any:
    """Makes a step of the reference at drawn weights; the teacher's are drawn separately."""
    weights, other = (random_parameters(user.model, each) for each in (seed, seed + 1))
    texts = HardBatch(user, number).texts()
    rows = rows_of(texts, user.data.seq_length, user.model.vocab_size, torch.device("cpu"))

    def none(*anything: object) -> Any:
        raise AssertionError("every function here is the package's own")

    return evaluated(user, weights, rows, Transformer(user.model, other), none)


def row(name: str, number: int) -> Any:
    """Builds a case; by day each meets one of the three kinds of masks, and those of many terms all of them."""
    by_day = number == list(CASES).index(name) % 3 or name in ("plain", "side terms")
    return pytest.param(CASES[name], number, id=f"{name}-{number}", marks=() if by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("changes", "number"), [row(name, number) for name in CASES for number in (0, 1, 2)])
def test_both_say_the_same_of_every_loss_and_gradient(changes: dict[str, Any], number: int) -> None:
    user = config(**(SMALL | changes))
    found = reference(user, number, seed=3)
    (exact,) = oracle_steps(
        random_parameters(user.model, 3),
        user.model,
        user.loss,
        user.optimizer,
        [1e-3],
        [[Sequence.of_sample(sample, with_text=True) for sample in HardBatch(user, number).samples()]],
        Teacher(random_parameters(user.model, 4), user.model),
    )
    assert {name: term.denominator for name, term in found.terms.items()} == pytest.approx(exact.denominators, 1e-14)
    means = {name: float(term.mean.detach()) for name, term in found.terms.items()}
    assert means == pytest.approx(exact.means, rel=1e-11, abs=1e-13)
    assert found.objective == pytest.approx(exact.loss, rel=1e-11)
    assert found.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        largest = float(gradient.abs().max())
        assert float((found.gradients[name] - gradient).abs().max()) <= 1e-9 * largest + 1e-14, name
    for name, bias in found.biases.items():
        assert torch.equal(bias, exact.parameters[name])
    assert bool(found.biases) == (user.model.experts is not None and user.model.experts.bias_update_rate > 0)


def test_no_other_field_of_megatron_changes_the_function() -> None:
    known = {name for case in CASES.values() for name in case.get("model__megatron", {})}
    assert {name for name, field in PROVEN.items() if field.changes_the_function} == known


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_both_name_the_same_tensors(changes: dict[str, Any]) -> None:
    model = config(**(SMALL | changes)).model
    assert shapes_of(model) == parameter_shapes(model)
