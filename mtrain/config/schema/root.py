"""The whole configuration of a run."""

import json
from collections.abc import Iterator
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from mtrain.base.notebook import html_table
from mtrain.config import adapters, combinations, consent, derived, known_issues, rules
from mtrain.config.schema.sections import Sections


class Config(Sections):
    """Everything needed to repeat a run."""

    def __repr__(self) -> str:
        rows = self._given_keys()
        width = max(len(key) for key, _ in rows)
        return "\n".join(f"{key:<{width}}  {value}" for key, value in rows)

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return html_table(self._given_keys())

    def _given_keys(self) -> list[tuple[str, str]]:
        """Returns the keys that are not defaults, with their values, for people."""
        rows: list[tuple[str, str]] = []

        def add(prefix: str, value: Any) -> None:
            if isinstance(value, dict) and value:
                for name, inner in value.items():
                    add(f"{prefix}.{name}" if prefix else name, inner)
            else:
                rows.append((prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))

        add("", self.model_dump(mode="json", exclude_unset=True))
        return rows

    @model_validator(mode="before")
    @classmethod
    def count_warmup_in_steps(cls, content: Any) -> Any:
        return derived.with_warmup_steps(content)

    @model_validator(mode="wrap")
    @classmethod
    def resolve_all_linear(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Replaces all-linear with the model's targets and marks them as not set, so that a resumed run keeps the
        targets of its first start."""
        resolved = adapters.with_linear_targets(content)
        config = handler(resolved)
        if resolved is not content and config.adapter is not None:
            config.adapter.model_fields_set.discard("targets")
        return config

    def broken_rules(self) -> Iterator[str]:
        """Yields a message for every broken rule between sections."""
        model, layout, train, loss, data = self.model, self.layout, self.train, self.loss, self.data
        yield from consent.broken_rules(type(self), self.checkpoint.allow_changed)
        if model.hf is not None and self.checkpoint.initialize_from is not None:
            yield (
                f"checkpoint.initialize_from={self.checkpoint.initialize_from} and model.hf={model.hf} both give the "
                "weights to start from; remove one of them"
            )
        yield from rules.added_tokens(model, self.checkpoint)
        yield from rules.steps(train, self.optimizer)
        yield from rules.validation(self.valid, data)
        yield from rules.prompts(self.eval, self.valid, model, data)
        yield from rules.judging(self.eval, self.valid, data)
        yield from rules.tensor_parallel(model, layout)
        yield from rules.pipeline(model, layout)
        yield from rules.experts(model, layout)
        yield from rules.layout_dependent(model, loss)
        yield from rules.router_losses(model, loss)
        yield from rules.replayed_choices(model, data)
        yield from rules.recompute(train, model)
        yield from known_issues.beyond_cp_comm(model, layout, data)
        yield from combinations.products_in_8_bits(self)
        yield from rules.compiled(train, self.dropout_keys)
        yield from rules.deterministic(train, model)
        if train.offload_optimizer and self.optimizer.kind != "adamw":
            yield (
                "train.offload_optimizer=true moves AdamW's moments, but under "
                f"optimizer.kind={self.optimizer.kind} matrices have a momentum instead; remove it, or use "
                "optimizer.kind=adamw"
            )
        yield from rules.multi_token(model, loss, data)
        if self.adapter is not None:
            yield from adapters.broken_rules(self, self.adapter)
        yield from rules.preferences(self)
        yield from rules.heads(self)
        yield from combinations.images(self)
        yield from rules.sequence(layout, train, data)
        yield from rules.packing(train, data)
        yield from combinations.sharded_weights(self)
        yield from known_issues.documents_need_torch_layers(model, layout, data)
        yield from known_issues.too_much_for_transformer_engine(self)
        yield from known_issues.refusals(self)
