"""The layers that a run gets, as if there were a GPU and TransformerEngine."""

from typing import Any

import pytest
import torch

from mtrain.base.errors import ConfigError
from mtrain.mcore.model import layer_spec
from mtrain.mcore.model.layer_spec import chosen_backend
from tests.config.samples import config
from tests.messages import refuses

CUDA = torch.device("cuda")
IN_8_BITS: dict[str, Any] = {"train__fp8": "hybrid"}


@pytest.fixture
def _with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_spec, "has_transformer_engine", lambda: True)


@pytest.mark.usefixtures("_with_transformer_engine")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "te"),
        ({"model__backend": "torch"}, "torch"),
        ({"train__precision": "fp16"}, "te"),
        (IN_8_BITS, "te"),
        ({"train__precision": "fp32"}, "torch"),
        ({"layout": {"tp": 2, "cp": 2, "cp_comm": "ulysses"}}, "te"),
        ({"layout": {"tp": 2, "cp": 4, "cp_comm": "ulysses"}}, "torch"),  # two key/value heads on a rank
        ({"layout": {"tp": 2, "cp": 4}}, "te"),
        ({"model__experts": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}, "torch"),
    ],
    ids=str,
)
def test_auto_takes_what_can_do_the_work(changes: dict[str, Any], expected: str) -> None:
    assert chosen_backend(config(**changes), CUDA) == expected


def test_fp8_is_refused_where_its_layers_cannot_be_used() -> None:
    with refuses(ConfigError, "train.fp8=hybrid", "transformer_engine"):
        chosen_backend(config(**IN_8_BITS), torch.device("cpu"))


def test_without_transformer_engine_auto_takes_torch_and_te_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not layer_spec.has_transformer_engine()
    assert chosen_backend(config(), CUDA) == "torch"
    with refuses(ConfigError, "transformer_engine"):
        chosen_backend(config(model__backend="te"), CUDA)
    monkeypatch.setattr(layer_spec, "faulty_gpu_packages", lambda: {"transformer_engine": "OSError: no libcudart"})
    with refuses(ConfigError, "transformer_engine"):
        chosen_backend(config(model__backend="te"), CUDA)
