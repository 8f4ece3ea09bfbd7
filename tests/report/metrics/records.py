"""Records for tests."""

from dataclasses import replace

from mtrain.report.metrics.record import StepRecord, TermRecord, ValidRecord


def step_record(step: int, loss: float = 2.5, *, empty: bool = False, skipped: str | None = None) -> StepRecord:
    """Builds a plausible step of 1024 tokens in half a second."""
    return StepRecord(
        step=step,
        loss=loss,
        denominator=1000.0,
        grad_norm=0.5,
        lr=1e-3,
        tokens=1024,
        seconds=0.5,
        tokens_per_second=2048.0,
        terms={"main": TermRecord(loss=loss, numerator=loss * 1000.0, denominator=1000.0)},
        empty=empty,
        skipped=skipped,
    )


def valid_record(step: int, valid_loss: float = 2.75) -> ValidRecord:
    """Builds a plausible validation pass."""
    return ValidRecord(step=step, valid_loss=valid_loss, denominator=500.0, samples=8, seconds=0.1)


def with_side_terms(record: StepRecord | ValidRecord) -> StepRecord | ValidRecord:
    """Returns the record of an objective with a side term, and one that had nothing to learn."""
    kl = TermRecord(loss=0.0123456, numerator=0.0246912, denominator=2.0)
    return replace(record, terms={**record.terms, "kl": kl, "z": TermRecord(loss=0.0, numerator=0.0, denominator=0.0)})
