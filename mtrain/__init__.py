"""mtrain: layout-exact pretraining and finetuning of language models on Megatron-Core.

    from mtrain import Datum, Engine, load_config

    with Engine(load_config(["model.yaml", "run.yaml"])) as engine:
        engine.forward_backward([Datum([5, 6, 7])])
        print(engine.optim_step().loss)

    run = mtrain.train(load_config(["model.yaml", "run.yaml"]))
    mtrain.plot(run)

These names are the public API (docs/api/index.md). They are loaded at first use: `import mtrain` and `load_config` need
no torch, which takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from mtrain.base.version import __version__

if TYPE_CHECKING:
    from mtrain.api.engine import Engine
    from mtrain.api.runs import train
    from mtrain.api.turns import close_all
    from mtrain.base.errors import (
        ConfigError,
        DataError,
        MachineError,
        MtrainError,
        NumericError,
        RankLostError,
        RunFolderError,
    )
    from mtrain.checkpoint.weights import read_weights
    from mtrain.config import Config
    from mtrain.core.batch.datum import Datum
    from mtrain.core.loss.pair import (
        LossFunction,
        LossPair,
        TermInputs,
        at_temperature,
        diagnosed,
        needs_extras,
        needs_teacher,
        per_token,
        reports,
        stacked_extra,
        weigh,
        weigh_sequences,
    )
    from mtrain.core.loss.preference.member import GroupMember
    from mtrain.core.loss.preference.scores import PreferenceValue, ScoredSequences, preference_loss
    from mtrain.core.step.results import EvalResult, ForwardResult, StepResult
    from mtrain.hf.configuration import load_config
    from mtrain.hf.io.broadcast import receive_hf_tensors
    from mtrain.hf.io.weight_delta import WeightCopy
    from mtrain.launch.streamed import launch
    from mtrain.report.metrics.plot import plot
    from mtrain.report.monitor.training_run import TrainingRun
    from mtrain.training.sampling.params import SamplingParams
    from mtrain.training.sampling.sampler import Completion

_MODULES = {
    "mtrain.api.engine": "Engine",
    "mtrain.api.runs": "train",
    "mtrain.api.turns": "close_all",
    "mtrain.base.errors": "ConfigError DataError MachineError MtrainError NumericError RankLostError RunFolderError",
    "mtrain.checkpoint.weights": "read_weights",
    "mtrain.config": "Config",
    "mtrain.core.batch.datum": "Datum",
    "mtrain.core.loss.pair": "LossFunction LossPair TermInputs at_temperature diagnosed needs_extras needs_teacher "
    "per_token reports stacked_extra weigh weigh_sequences",
    "mtrain.core.loss.preference.member": "GroupMember",
    "mtrain.core.loss.preference.scores": "PreferenceValue ScoredSequences preference_loss",
    "mtrain.core.step.results": "EvalResult ForwardResult StepResult",
    "mtrain.hf.configuration": "load_config",
    "mtrain.hf.io.broadcast": "receive_hf_tensors",
    "mtrain.hf.io.weight_delta": "WeightCopy",
    "mtrain.launch": "launch",
    "mtrain.report.metrics.plot": "plot",
    "mtrain.report.monitor.training_run": "TrainingRun",
    "mtrain.training.sampling.params": "SamplingParams",
    "mtrain.training.sampling.sampler": "Completion",
}
"""Module -> its public names, separated by spaces."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Completion",
    "Config",
    "ConfigError",
    "DataError",
    "Datum",
    "Engine",
    "EvalResult",
    "ForwardResult",
    "GroupMember",
    "LossFunction",
    "LossPair",
    "MachineError",
    "MtrainError",
    "NumericError",
    "PreferenceValue",
    "RankLostError",
    "RunFolderError",
    "SamplingParams",
    "ScoredSequences",
    "StepResult",
    "TermInputs",
    "TrainingRun",
    "WeightCopy",
    "__version__",
    "at_temperature",
    "close_all",
    "diagnosed",
    "launch",
    "load_config",
    "needs_extras",
    "needs_teacher",
    "per_token",
    "plot",
    "preference_loss",
    "read_weights",
    "receive_hf_tensors",
    "reports",
    "stacked_extra",
    "train",
    "weigh",
    "weigh_sequences",
]

if not TYPE_CHECKING:  # a type checker must still refuse names that do not exist

    def __getattr__(name: str) -> object:
        """Imports a public name at its first use (PEP 562); afterwards it is an attribute like any other."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'mtrain' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
