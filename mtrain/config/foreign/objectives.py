"""Objectives of other programs: losses, preferences and reward models, and the keys that a loss makes unused."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.config.foreign.translation import Put, Settings, Translation, choice
from mtrain.config.foreign.values import boolean, listed, number

PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
LOSSES_OF_PAIRS = {"sigmoid": "dpo", "ipo": "ipo"}
"""Loss of pairs in TRL and in programs that use its trainers -> loss.function."""


def reward_model(config: Translation, value: Any, name: str) -> None:
    """Sets the loss and the head of a reward model, if the switch is on."""
    if boolean(value):
        config.put("loss.function", "reward_model", name)
        config.put("model.num_labels", 1, name)


def objective_of(values: Mapping[str, str] | Sequence[str]) -> Put:
    """Returns a function that sets the loss from the name of an objective.

    Others are refused: without them the run would minimise something else.

    Args:
        values: Objective in another program -> loss.function; a list if the names are the same.
    """
    known = dict(values) if isinstance(values, Mapping) else dict(zip(values, values))

    def put(config: Translation, value: Any, name: str) -> None:
        if value in known:
            choice("loss.function", known).put(config, value, name)
        else:
            config.wrong.append(
                f"{name}={value}: loss.function supports {', '.join(known.values())}; a loop in Python does the rest: "
                "see docs/training/rl.md"
            )

    return put


def put_loss_of_pairs(config: Translation, value: Any, name: str, known: Mapping[str, str] = LOSSES_OF_PAIRS) -> None:
    """Sets the loss of a trainer of preferences, which `value` names, in place of the trainer's own; refuses others.

    Args:
        known: Loss in the other program -> loss.function.
    """
    kinds = [str(kind) for kind in listed(value)]
    if len(kinds) != 1 or kinds[0] not in known:
        choices = ", ".join(dict.fromkeys(f"{ours} ({kind})" if kind != ours else ours for kind, ours in known.items()))
        config.wrong.append(
            f"{name}={', '.join(kinds)}: loss.function supports {choices} here; choose one, or write the loss as a "
            "function of your own, loss.function=package.module:name"
        )
        return
    named = name if config.is_default(name) else f"{name}={kinds[0]}"
    origins = [*filter(None, [config.origins.get("loss.function")]), named]
    config.drop("loss.function", is_named=False)
    config.put("loss.function", known[kinds[0]], ", ".join(origins))


def aggregate_as_main(config: Translation, term: str) -> None:
    """Gives a side term the aggregation of the main term; its own default is token-mean."""
    for key in ("aggregation", "norm_length"):
        ours = f"loss.{key}"
        if config.get(ours) not in (None, "token-mean"):
            config.put(f"loss.side_terms.{term}.{key}", config.get(ours), config.origins[ours])


def put_likelihood(config: Translation, run: Settings) -> None:
    """Reports the likelihood term of chosen answers, which TRL adds to SimPO unless its weight is 0."""
    if number(1 if run["cpo_alpha"] is None else run["cpo_alpha"]):
        config.lost.append(
            f"{run.described('cpo_alpha')}: simpo does not include the likelihood of chosen answers here; see "
            "loss.side_terms"
        )


def finish_loss(config: Translation) -> None:
    """Drops keys that the loss does not use, and notes the records that it needs."""
    function = config.get("loss.function")
    if function is None:
        config.drop("loss.options")
        return
    options: Mapping[str, tuple[str, ...]] = {
        "dpo": ("beta", "label_smoothing"),
        "ipo": ("beta",),
        "kto": ("beta", "desirable_weight", "undesirable_weight"),
        "orpo": ("beta",),
        "simpo": ("beta", "gamma", "label_smoothing"),
        "reward_model": ("center_rewards_coefficient",),
    }
    if function not in options:
        return
    for option in list(config.get("loss.options") or {}):
        if option not in options[function]:
            config.drop(f"loss.options.{option}")
    config.drop("data.format")
    config.drop("data.loss_on")
    if config.get("data.packing.batch") == "rows":
        name = config.origins["data.packing"]
        config.drop("data.packing", is_named=False)
        config.notes.append(f"{name}: samples are not packed, since rows would split the pairs of {function}")
    drop_dropout(config, f"loss.function={function} runs the model twice per step, without dropout")
    config.notes.append("records have prompt, chosen and rejected, or for kto prompt, completion and label")


def drop_dropout(config: Translation, why: str) -> None:
    """Drops and reports the dropout of adapters, if it is set."""
    if config.get("adapter.dropout"):
        config.lost.append(f"{config.origins['adapter.dropout']}={config.get('adapter.dropout')}: {why}")
        config.drop("adapter.dropout", is_named=False)
