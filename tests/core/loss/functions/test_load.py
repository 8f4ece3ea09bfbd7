"""Loss functions are found by name, and an error about a wrong name says what to change."""

from pathlib import Path

import pytest
import torch

from mtrain.base.errors import ConfigError
from mtrain.core.loss.functions.likelihood import next_token_loss
from mtrain.core.loss.functions.load import load_loss_function
from tests.core.loss.microbatches import term_inputs
from tests.messages import refuses


def test_a_function_is_loaded_and_its_options_are_bound() -> None:
    inputs = term_inputs(torch.ones(2, 3))
    plain = load_loss_function("next_token", {})(inputs)
    scaled = load_loss_function("tests.core.loss.bad_losses:scaled", {"factor": 4.0})(inputs)
    assert torch.equal(plain.numerator, next_token_loss(inputs).numerator)
    assert torch.equal(scaled.numerator, plain.numerator * 4)


@pytest.mark.parametrize(
    ("path", "options", "fact"),
    [
        ("next_tokens", {}, "next_token"),
        ("mtrain.core.loss.functions.likelihood:", {}, "package.module:name"),
        (":next_token_loss", {}, "package.module:name"),
        ("no_such_package.losses:mine", {}, "'no_such_package'"),
        ("mtrain.loss.nowhere:mine", {}, "'mtrain.loss.nowhere'"),
        ("mtrain.core.loss.functions.likelihood:next_token_los", {}, "next_token_loss"),
        ("tests.core.loss.bad_losses:zzz", {}, "counted_in_integers"),
        ("tests.core.loss.bad_losses:not_a_function", {}, "not_a_function"),
        ("tests.core.loss.bad_losses:scaled", {}, "'factor'"),
        ("tests.core.loss.bad_losses:scaled", {"factor": 1, "size": 2}, "'size'"),
        ("tests.core.loss.bad_losses:mean", {"inputs": 1}, "'inputs'"),
        ("builtins:max", {}, "builtins:max"),
    ],
)
def test_a_wrong_name_or_option_is_one_message(path: str, options: dict[str, object], fact: str) -> None:
    with refuses(ConfigError, "loss.function", fact) as caught:
        load_loss_function(path, options)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_installed_anywhere", "importing {module} failed: No module named 'not_installed_anywhere'"),
        ("from mtrain.core.loss.pair import Nothing", "importing {module} failed: cannot import name 'Nothing'"),
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
