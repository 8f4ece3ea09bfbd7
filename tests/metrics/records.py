"""Records for tests."""

from mtrain.metrics.record import StepRecord, TermRecord, ValidRecord


def step_record(step: int, loss: float = 2.5, *, empty: bool = False, skipped: str | None = None) -> StepRecord:
    """A plausible step of 1024 tokens in half a second."""
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
    """A plausible validation pass."""
    return ValidRecord(step=step, valid_loss=valid_loss, denominator=500.0, samples=8, seconds=0.1)
