"""The whole configuration of a run."""

from collections.abc import Iterable
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, model_validator

from mtrain.config import adapters, consent, derived, known_issues, rules
from mtrain.config.schema.section import rule
from mtrain.config.schema.sections import Sections


class Config(Sections):
    """Everything that is needed to repeat a run."""

    @model_validator(mode="before")
    @classmethod
    def the_warmup_is_counted_in_steps(cls, content: Any) -> Any:
        return derived.with_warmup_steps(content)

    @model_validator(mode="wrap")
    @classmethod
    def all_linear_is_of_the_model(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Replaces all-linear by the model's targets, which count as not set: a resumed run keeps those of its first
        start."""
        resolved = adapters.with_linear_targets(content)
        config = handler(resolved)
        if resolved is not content and config.adapter is not None:
            config.adapter.model_fields_set.discard("targets")
        return config

    @rule
    def what_is_allowed_to_change_can_change(self) -> str | None:
        return _lines(consent.broken_rules(type(self), self.checkpoint.allow_changed))

    @rule
    def a_run_starts_from_one_place(self) -> str | None:
        if self.model.hf is None or self.checkpoint.initialize_from is None:
            return None
        return (
            f"checkpoint.initialize_from={self.checkpoint.initialize_from} and model.hf={self.model.hf} both give the "
            "weights to start from; remove one of them"
        )

    @rule
    def tokens_are_added_to_a_folder(self) -> str | None:
        return _lines(rules.added_tokens(self.model, self.checkpoint))

    @rule
    def the_steps_fit_the_schedule(self) -> str | None:
        return _lines(rules.steps(self.train, self.optimizer))

    @rule
    def validation_has_samples(self) -> str | None:
        return _lines(rules.validation(self.valid, self.data))

    @rule
    def prompts_can_be_answered(self) -> str | None:
        return _lines(rules.prompts(self.eval, self.valid, self.model, self.data))

    @rule
    def the_model_divides_over_tensor_ranks(self) -> str | None:
        return _lines(rules.tensor_parallel(self.model, self.layout))

    @rule
    def the_layers_divide_over_stages(self) -> str | None:
        return _lines(rules.pipeline(self.model, self.layout))

    @rule
    def the_experts_divide_over_ranks(self) -> str | None:
        return _lines(rules.experts(self.model, self.layout))

    @rule
    def the_layout_decides_nothing_unasked(self) -> str | None:
        return _lines(rules.layout_dependent(self.model, self.loss))

    @rule
    def router_losses_have_routers(self) -> str | None:
        return _lines(rules.router_losses(self.model, self.loss))

    @rule
    def choices_are_of_the_model(self) -> str | None:
        return _lines(rules.replayed_choices(self.model, self.data))

    @rule
    def what_is_recomputed_is_there(self) -> str | None:
        return _lines(rules.recompute(self.train, self.model))

    @rule
    def context_parallelism_knows_the_features(self) -> str | None:
        return _lines(known_issues.beyond_cp_comm(self))

    @rule
    def products_in_8_bits_can_be_made(self) -> str | None:
        return _lines(rules.products_in_8_bits(self))

    @rule
    def layers_can_be_compiled(self) -> str | None:
        return _lines(rules.compiled(self))

    @rule
    def a_deterministic_run_can_be(self) -> str | None:
        return _lines(rules.deterministic(self))

    @rule
    def what_moves_to_the_host_is_of_adamw(self) -> str | None:
        if not self.train.offload_optimizer or self.optimizer.kind == "adamw":
            return None
        return (
            "train.offload_optimizer=true moves AdamW's moments, but under "
            f"optimizer.kind={self.optimizer.kind} matrices have a momentum, which stays; remove it, or use "
            "optimizer.kind=adamw"
        )

    @rule
    def several_tokens_can_be_predicted(self) -> str | None:
        return _lines(rules.multi_token(self.model, self.loss, self.data))

    @rule
    def adapters_fit_the_run(self) -> str | None:
        return None if self.adapter is None else _lines(adapters.broken_rules(self, self.adapter))

    @rule
    def preferences_fit_the_run(self) -> str | None:
        return _lines(rules.preferences(self))

    @rule
    def heads_fit_the_run(self) -> str | None:
        return _lines(rules.heads(self))

    @rule
    def the_sequence_divides_over_ranks(self) -> str | None:
        return _lines(rules.sequence(self.layout, self.train, self.data))

    @rule
    def packed_rows_take_every_sample(self) -> str | None:
        return _lines(rules.packing(self.train, self.data))

    @rule
    def documents_are_seen_by_attention(self) -> str | None:
        return _lines(known_issues.documents_need_torch_layers(self))

    @rule
    def the_backend_can_do_the_work(self) -> str | None:
        return _lines(known_issues.too_much_for_transformer_engine(self))

    @rule
    def passed_fields_let_no_fault_in(self) -> str | None:
        return _lines(known_issues.refusals(self))


def _lines(messages: Iterable[str]) -> str | None:
    return "\n".join(messages) or None
