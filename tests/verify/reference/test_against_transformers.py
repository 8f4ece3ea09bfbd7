"""Logits and gradients of the reference are those of transformers, for every family, in float64.

transformers computes norms, rotary angles and the softmax in float32 whatever the model's dtype; here its own code
runs with every mention of float32 read as float64, so that the comparison can be strict.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from mtrain.config.megatron_fields import PROVEN
from mtrain.config.schema.model import ModelSection
from mtrain.verify.reference.model.modules import activated
from mtrain.verify.reference.model.shapes import UNTRAINED
from mtrain.verify.reference.model.transformer import Transformer
from mtrain.verify.reference.text import Rows
from tests.hf.megatron_names import from_huggingface
from tests.reference import logits_of, random_parameters
from tests.verify.reference.dense_models import (
    SMALL,
    gemma3,
    gemma4,
    linear_rope,
    llama3_rope,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    qwen2,
    qwen3,
    qwen3_with_global_layers,
    smollm3,
    smollm3_marked,
    starcoder2,
    starcoder2_exact_gelu,
    yarn_rope,
    yarn_rope_rounded,
)
from tests.verify.reference.expert_models import (
    deepseek_v2,
    deepseek_v2_experts,
    deepseek_v3,
    deepseek_v3_direct_queries,
    deepseek_v3_experts,
    deepseek_v3_halves,
    gemma4_experts,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    kimi_k2,
    minimax,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_moe_unnormalised,
)
from tests.verify.reference.hybrid_models import nemotron_h, qwen3_5, qwen3_next


class Float32IsFloat64(TorchFunctionMode):
    """Reads float32 as float64 wherever a torch function is given a dtype."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        if func is Tensor.div and not args[0].dtype.is_floating_point:  # else of torch's default dtype
            args = args[0].double(), *args[1:]
        promoted = {key: _promoted(value) for key, value in (kwargs or {}).items()}
        return func(*(_promoted(value) for value in args), **promoted)


def _promoted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


FAMILIES = [
    deepseek_v3_experts,
    kimi_k2,
    glm4_moe_lite,
    deepseek_v2_experts,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    qwen3_moe_unnormalised,
    smollm3,
    smollm3_marked,
    deepseek_v3,
    deepseek_v3_halves,
    deepseek_v3_direct_queries,
    deepseek_v2,
    llama3_rope,
    linear_rope,
    yarn_rope,
    yarn_rope_rounded,
    qwen2,
    qwen3,
    qwen3_with_global_layers,
    mistral,
    ministral3,
    starcoder2,
    starcoder2_exact_gelu,
    gemma3,
    gemma4,
    gemma4_experts,
    olmo2,
    olmo3,
    minimax,
    glm4_moe,
    gpt_oss,
    qwen3_next,
    qwen3_5,
    nemotron_h,
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(family: Callable[[], tuple[ModelSection, Any]]) -> None:
    model, config = family()
    torch.manual_seed(7)
    tokens = torch.randint(model.vocab_size, (2, 40))
    with Float32IsFloat64():
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).double()
        for name, value in theirs.state_dict().items():
            torch.nn.init.normal_(value, std=0.3)
            assert value.dtype == torch.float64, name
        expected = theirs(tokens).logits
        F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    parameters = from_huggingface(theirs.state_dict(), model)
    trained = {name: value.requires_grad_() for name, value in parameters.items() if not name.endswith(UNTRAINED)}
    logits = logits_of(parameters, model, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)

    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected_gradients = from_huggingface(gradients, model)
    torch.testing.assert_close(
        {name: value.grad for name, value in trained.items()}, expected_gradients, rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("family", [qwen3_5, nemotron_h])
def test_state_and_window_begin_anew_with_each_document(family: Callable[[], tuple[ModelSection, Any]]) -> None:
    """A row of documents has the logits and the gradients of transformers' calls for each of them."""
    model, config = family()
    torch.manual_seed(8)
    tokens, ends = torch.randint(model.vocab_size, (1, 24)), [9, 10, 12, 24]
    places = torch.arange(24)
    documents = torch.bucketize(places, torch.tensor(ends), right=True)
    starts = torch.tensor([0, *ends])[documents]
    with Float32IsFloat64():
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).double()
        for value in theirs.state_dict().values():
            torch.nn.init.normal_(value, std=0.3)
        expected = torch.cat([theirs(tokens[:, start:end]).logits for start, end in zip([0, *ends], ends)], dim=1)
        expected.square().sum().backward()
    parameters = from_huggingface(theirs.state_dict(), model)
    trained = {name: value.requires_grad_() for name, value in parameters.items() if not name.endswith(UNTRAINED)}
    none = torch.zeros(1, 24, dtype=torch.int64)
    rows = Rows(tokens, none, none.double(), documents[None], (places - starts)[None], torch.ones(1).double())
    logits = Transformer(model, parameters).forward(rows).logits
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)

    logits.square().sum().backward()
    gradients = from_huggingface({name: value.grad for name, value in theirs.named_parameters()}, model)
    torch.testing.assert_close({name: value.grad for name, value in trained.items()}, gradients, rtol=1e-9, atol=1e-9)


def test_gates_beyond_their_bounds_are_those_of_transformers() -> None:
    """The models above have no gate beyond 7."""
    model, config = gpt_oss()
    gate, up = torch.linspace(-20, 20, 40).double().requires_grad_(), torch.linspace(15, -15, 40).double()
    theirs = GptOssExperts(config)._apply_gate(torch.stack([gate, up], dim=-1).flatten())
    ours = activated(model, torch.cat([gate, up]))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    (found,), (expected,) = (torch.autograd.grad(each.sum(), gate) for each in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_no_other_field_of_megatron_changes_the_function() -> None:
    known = {name for family in FAMILIES for name in family()[0].megatron}
    assert {name for name, field in PROVEN.items() if field.changes_the_function} == known


def test_parameters_of_another_model_are_refused() -> None:
    model = ModelSection(**SMALL)
    biased = model.model_copy(update={"qkv_bias": True})
    with pytest.raises(AssertionError, match=r"linear_qkv\.bias"):
        logits_of(random_parameters(model, seed=1), biased, torch.zeros(1, 3, dtype=torch.int64))
