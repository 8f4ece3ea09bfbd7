"""Loss functions are found by name, and an error about a wrong name says what to change."""

from pathlib import Path

import pytest
import torch

from mtrain.base.errors import ConfigError
from mtrain.loss.functions.likelihood import next_token_loss
from mtrain.loss.functions.load import load_loss_function
from tests.loss.microbatches import term_inputs


def test_a_function_is_loaded_and_its_options_are_bound() -> None:
    inputs = term_inputs(torch.ones(2, 3))
    plain = load_loss_function("next_token", {})(inputs)
    scaled = load_loss_function("tests.loss.bad_losses:scaled", {"factor": 4.0})(inputs)
    assert torch.equal(plain.numerator, next_token_loss(inputs).numerator)
    assert torch.equal(scaled.numerator, plain.numerator * 4)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("next_tokens", {}, "choose next_token, z_loss, entropy, distillation"),
        ("mtrain.loss.functions.likelihood:", {}, "a function of your own as package.module:name"),
        (":next_token_loss", {}, "a function of your own as package.module:name"),
        ("no_such_package.losses:mine", {}, "no module 'no_such_package' on the import path"),
        ("mtrain.loss.nowhere:mine", {}, "no module 'mtrain.loss.nowhere' on the import path"),
        ("mtrain.loss.functions.likelihood:next_token_los", {}, "did you mean next_token_loss"),
        ("tests.loss.bad_losses:zzz", {}, "it has counted_in_integers, differentiable_denominator"),
        ("tests.loss.bad_losses:not_a_function", {}, "is a int, but has to be a function"),
        ("tests.loss.bad_losses:scaled", {}, "missing a required argument: 'factor'; change loss.options"),
        ("tests.loss.bad_losses:scaled", {"factor": 1, "size": 2}, "unexpected keyword argument 'size'"),
        ("tests.loss.bad_losses:mean", {"inputs": 1}, "multiple values for argument 'inputs'"),
        ("builtins:max", {}, "no Python signature"),
    ],
)
def test_a_wrong_name_or_option_is_one_message(path: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"loss\.function=") as caught:
        load_loss_function(path, options)
    assert message in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_installed_anywhere", "importing {module} failed: No module named 'not_installed_anywhere'"),
        ("from mtrain.loss.pair import Nothing", "importing {module} failed: cannot import name 'Nothing'"),
        ("def broken(:", "importing {module} failed: invalid syntax"),
    ],
)
def test_a_module_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    module = f"losses_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        load_loss_function(f"{module}:broken", {})
    assert message.format(module=module) in str(caught.value)
