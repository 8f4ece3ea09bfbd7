"""Numbers of a record for TensorBoard and trackers."""

from __future__ import annotations

from mtrain.metrics.record import ChangeRecord, Record, StepRecord, ValidRecord


def scalars(record: Record) -> dict[str, float]:
    """Returns tag -> number; empty for a record without numbers."""
    match record:
        case ChangeRecord():
            return {}
        case ValidRecord():
            sets = {f"valid/loss/{name}": each.loss for name, each in record.valid_sets.items()}
            return {"valid/loss": record.valid_loss} | sets | _term_means(record, "valid_terms")
        case StepRecord():
            loss = {} if record.empty else {"train/loss": record.loss}
            known = {
                "train/loss_scale": record.loss_scale,
                "speed/mfu": record.mfu,
                "speed/flops_per_second": _per_second(record.flops, record.seconds),
                "speed/loss_tokens_per_second": _per_second(record.loss_tokens, record.seconds),
                "tokens/padding": record.padding_tokens,
                "tokens/loss": record.loss_tokens,
                "memory/bytes": record.memory_bytes,
            }
            return {
                **loss,
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "train/denominator": record.denominator,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/seconds": record.seconds,
                "tokens/text": record.tokens,
                **_term_means(record, "terms"),
                **{f"diagnostics/{name}": value for name, value in record.diagnostics.items()},
                **{f"train/loss/{name}": each.loss for name, each in record.sources.items()},
                **{tag: value for tag, value in known.items() if value is not None},
            }


def _per_second(count: float | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else count / seconds


def _term_means(record: StepRecord | ValidRecord, prefix: str) -> dict[str, float]:
    """Returns the means of terms that have a denominator."""
    return {f"{prefix}/{name}": term.loss for name, term in record.terms.items() if term.denominator != 0}
