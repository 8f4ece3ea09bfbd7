"""Tasks, requests and metrics of lm-eval, on the first rank only.

lm-eval is an extra of fifty packages, so only this module imports it, inside functions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mtrain.base.errors import ConfigError, DataError, MtrainError
from mtrain.config.schema.train import EvalSection

if TYPE_CHECKING:
    from mtrain.training.tasks.requests import TextModel  # torch, which `mtrain check` does not need

_GENERATES = "generate_until"
_KINDS = ("loglikelihood", "loglikelihood_rolling", "multiple_choice", _GENERATES)
"""Values of a task's `output_type` that a model of text can answer."""


class TaskResults(NamedTuple):
    """Results of all tasks."""

    metrics: dict[str, float]
    """Value by `task/metric`, or `task/metric,filter` with a filter other than none; groups of tasks included."""
    report: dict[str, Any]
    """lm-eval's own results: with standard errors, versions, numbers of samples and of few-shot examples."""


def refuse_missing_harness() -> None:
    """Raises ConfigError unless lm-eval is installed; does not import it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("tasks need lm-eval, which is not installed; run pip install 'mtrain[eval]'")


class Harness:
    """Tasks of a section, loaded once, so that a run refuses an unknown task before its first step."""

    def __init__(self, section: EvalSection) -> None:
        """Loads the tasks and their data.

        Raises:
            ConfigError: lm-eval is not installed, does not know a task, or a task needs more than text.
            DataError: The data of a task cannot be loaded.
        """
        refuse_missing_harness()
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        from lm_eval.tasks import TaskManager

        self._section = section
        with _named_faults("load"):
            self._manager = TaskManager(include_path=section.include_path)
            self._names = self._known_names()
            loaded = self._manager.load(self._names)
        self._tasks: Mapping[str, Any] = loaded["tasks"]
        self._groups: Mapping[str, Any] = loaded.get("groups", {})
        kinds = {name: task.get_config("output_type") for name, task in self._tasks.items()}
        if wrong := [f"{name} ({kind})" for name, kind in kinds.items() if kind not in _KINDS]:
            raise ConfigError(
                f"{', '.join(wrong)} is not a task of text, whose output_type is one of {', '.join(_KINDS)}; remove it"
            )
        self.generates = _GENERATES in kinds.values()
        """Whether a task needs generated text."""

    @property
    def _as_turns(self) -> bool:
        given = self._section.fewshot_as_multiturn
        return self._section.apply_chat_template if given is None else given

    def is_better_if_higher(self, metric: str) -> bool:
        """Says whether a higher value of `task/metric` is better; raises ConfigError if the tasks do not have it."""
        known: dict[str, bool] = {}
        for name, task in self._tasks.items():
            known |= {f"{name}/{key}": bool(is_higher) for key, is_higher in task.higher_is_better().items()}
        name, _, key = metric.partition("/")
        plain = f"{name}/{key.partition(',')[0]}"
        if plain in known:
            return known[plain]
        # a group averages the metrics of its tasks
        of_tasks = {key.rpartition("/")[2]: is_higher for key, is_higher in known.items()}
        if name in self._groups and plain.rpartition("/")[2] in of_tasks:
            return of_tasks[plain.rpartition("/")[2]]
        raise ConfigError(f"valid.metric={metric} is not a metric of the tasks; choose one of {', '.join(known)}")

    def evaluate(self, model: TextModel, num_bootstraps: int = 0) -> TaskResults:
        """Evaluates all tasks; the random states of Python and numpy do not change.

        Args:
            num_bootstraps: Number of resamples for the standard errors of some metrics; 0: no standard errors.
        """
        import lm_eval

        with _named_faults("evaluate"), _random_states_kept(), _without_output():
            results = lm_eval.simple_evaluate(
                model=_adapter(model),
                tasks=self._names,
                num_fewshot=self._section.num_fewshot,
                limit=self._section.limit,
                apply_chat_template=self._section.apply_chat_template,
                fewshot_as_multiturn=self._as_turns,
                system_instruction=self._section.system_instruction,
                bootstrap_iters=num_bootstraps,
                log_samples=False,
                task_manager=self._manager,
                # torch's random states belong to the run
                torch_random_seed=None,
            )
        report = {name: results[name] for name in _REPORTED if name in results}
        return TaskResults(dict(_metrics(results["results"])), report)

    def _known_names(self) -> list[str]:
        unknown = [name for name in self._section.tasks if not self._manager.match_tasks([name])]
        if unknown:
            folder = self._section.include_path
            has_no = "lm-eval has no" if folder is None else f"neither lm-eval nor the folder {folder} has a"
            raise ConfigError(
                f"{has_no} task {', '.join(unknown)}; choose one that `lm-eval ls tasks` lists, or give "
                "the folder of your own tasks with --include-path (eval.include_path)"
            )
        return list(dict.fromkeys(match for name in self._section.tasks for match in self._manager.match_tasks([name])))


_REPORTED = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")


def _metrics(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, values in results.items():
        for key, value in values.items():
            metric, _, name_of_filter = key.partition(",")
            if metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, int | float | np.number):
                continue
            if name_of_filter:
                yield f"{task}/{metric if name_of_filter == 'none' else key}", float(value)


def table(report: Mapping[str, Any]) -> str:
    """Returns the results as lm-eval prints them."""
    from lm_eval.utils import make_table

    parts = [make_table(report), *([make_table(report, "groups")] if report.get("groups") else [])]
    return "\n".join(map(str, parts))


def _adapter(model: TextModel) -> Any:
    """Returns the model as a subclass of lm-eval's LM."""
    from lm_eval.api.model import LM

    class Adapter(LM):  # type: ignore[misc]
        tokenizer_name = model.tokenizer.fingerprint

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return [(*score,) for score in model.loglikelihood([request.args for request in requests])]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return model.loglikelihood_rolling([text for (text,) in (request.args for request in requests)])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return model.generate_until([request.args for request in requests])

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            if model.chat is None:
                raise ConfigError(
                    "apply_chat_template needs a chat template, but the model has none (data.chat_template); "
                    "remove the option"
                )
            try:
                return model.chat(chat_history, add_generation_prompt)
            except DataError:
                others = [message for message in chat_history if message["role"] != "system"]
                if len(others) == len(chat_history):
                    raise
                return model.chat(others, add_generation_prompt)  # as lm-eval, for templates without the role

        def chat_template(self, chat_template: bool | str = False) -> str:
            return ""  # only recorded

    return Adapter()


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restores the random states of Python and numpy, which lm-eval seeds."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Keeps off the console a bar for each task, and what git says outside of a repository, as lm-eval asks for a
    commit that nothing here reads."""
    from lm_eval import evaluator
    from lm_eval.api import task

    with contextlib.ExitStack() as stack:
        for module, name, quiet in (
            (evaluator, "get_git_commit_hash", lambda: None),
            (task, "tqdm", lambda items, **_: items),
        ):
            if hasattr(module, name):
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, quiet)
        yield


@contextlib.contextmanager
def _named_faults(verb: str) -> Iterator[None]:
    """Turns any error of lm-eval, its libraries or a task's own code into one message."""
    try:
        yield
    except MtrainError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        raise DataError(
            f"lm-eval could not {verb} the tasks: {type(error).__name__}: {text}; fix the task, or make "
            "its data available on this machine"
        ) from error
