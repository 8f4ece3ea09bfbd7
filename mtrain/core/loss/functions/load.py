"""Loads the loss function named in the configuration, and reads its marks."""

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from mtrain.base.errors import ConfigError
from mtrain.base.spelling import meant
from mtrain.config.extras import columns
from mtrain.config.schema.loss import LOSS_FUNCTIONS
from mtrain.core.loss.pair import LossFunction, Reported


def load_loss_function(name: str, options: Mapping[str, Any]) -> LossFunction:
    """Imports a loss function, a key of `LOSS_FUNCTIONS` or `package.module:name`, and binds its options.

    Raises:
        ConfigError: The function cannot be imported or called, or its signature does not accept the options.
    """
    path = LOSS_FUNCTIONS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute.isidentifier()):
        raise ConfigError(
            f"loss.function={path!r} is not known; choose {', '.join(LOSS_FUNCTIONS)}, or name your own function as "
            "package.module:name"
        )
    module = _import(module_name, path)
    if not hasattr(module, attribute):
        raise ConfigError(f"loss.function={path!r}: {module_name} has no {attribute!r}; {_nearest(attribute, module)}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ConfigError(f"loss.function={path!r} is of type {type(function).__name__}, but has to be a function")
    return with_options(function, f"loss.function={path!r}", options)


def with_options(function: Any, label: str, options: Mapping[str, Any]) -> LossFunction:
    """Binds options of a loss function; messages name the function by `label`.

    Raises:
        ConfigError: The signature does not accept the options, or requires others.
    """
    try:
        # signature and bind instead of a trial call, which needs logits and would fail on the last stage alone
        signature = inspect.signature(function)
    except ValueError as error:
        raise ConfigError(f"{label} has no Python signature to call it by; wrap it in a def") from error
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{label} has the signature {signature} and is called with the microbatch first and the options "
            f"{', '.join(options) or 'none'}, but {error}; change loss.options"
        ) from error
    return functools.partial(function, **options)


def asks_for_teacher(function: LossFunction) -> bool:
    """Says whether a function was marked by `mtrain.needs_teacher`."""
    return _is_marked(function, "needs_teacher")


def is_per_token(function: LossFunction) -> bool:
    """Says whether a function was marked by `mtrain.per_token` and no option revokes the mark (`per_token_unless`)."""
    inner, bound = _unbound(function)
    whole: Mapping[str, Sequence[object]] = getattr(inner, "per_token_unless", {})
    return _is_marked(function, "per_token") and not any(bound.get(name) in values for name, values in whole.items())


def is_consuming(function: LossFunction) -> bool:
    """Says whether a function was marked by `consumes_logits`."""
    return _is_marked(function, "consumes_logits")


def reads_temperature(function: LossFunction) -> bool:
    """Says whether a function was marked by `mtrain.at_temperature` and no option sets the temperature."""
    return _is_marked(function, "at_temperature") and _unbound(function)[1].get("temperature") is None


def extras_of(function: LossFunction) -> tuple[str, ...]:
    """Returns the columns of the extras that `mtrain.needs_extras` declared for a function."""
    inner, bound = _unbound(function)
    always, by_option = getattr(inner, "needs_extras", ((), {}))
    defaults = {name: parameter.default for name, parameter in inspect.signature(inner).parameters.items()}
    options = defaults | bound
    names = (*always, *(name for option, name in by_option.items() if options[option]))
    return tuple(column for name in names for column in _columns(name, options))


def _columns(name: str, options: Mapping[str, Any]) -> list[str]:
    """Returns the columns of an extra: one for "advantages", and k, an option, for "topk_ids[k]"."""
    key, bracket, option = name.removesuffix("]").partition("[")
    return columns(key, options[option] if bracket else None)


def reported_by(function: LossFunction) -> Reported:
    """Returns the diagnostics that `mtrain.reports` declared for a function."""
    return getattr(_unbound(function)[0], "reports", Reported())


def _unbound(function: LossFunction) -> tuple[Any, dict[str, Any]]:
    """Splits a partial function into the function and its bound options."""
    return (function.func, function.keywords) if isinstance(function, functools.partial) else (function, {})


def _is_marked(function: LossFunction, mark: str) -> bool:
    return bool(getattr(_unbound(function)[0], mark, False))


def _import(module_name: str, path: str) -> ModuleType:
    """Imports a module, with different messages for a missing module and one whose import fails."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name
        # any other name is a failed import inside the user's module
        if missing is not None and (module_name == missing or module_name.startswith(f"{missing}.")):
            raise ConfigError(
                f"loss.function={path!r}: module {missing!r} is not on the import path; correct the name, install "
                "the package, or add the folder that holds it to PYTHONPATH"
            ) from error
        raise ConfigError(f"loss.function={path!r}: importing {module_name} failed: {error}") from error
    # any other error comes from the user's code, and keeps its traceback
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"loss.function={path!r}: importing {module_name} failed: {error}") from error


def _nearest(name: str, module: ModuleType) -> str:
    """Returns a hint that names the most similar function of the module, or all of them."""
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    match = meant(name, functions)
    return f"did you mean {match}?" if match else f"it has {', '.join(sorted(functions)) or 'no functions'}"
