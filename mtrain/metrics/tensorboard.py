"""The run's curves for TensorBoard."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from mtrain.files import disk_faults
from mtrain.metrics.record import Record, StepRecord, ValidRecord


class TensorBoardSink:
    """Writes every number of a record as a scalar at its step."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        """Opens an event file; TensorBoard hides what an earlier attempt wrote beyond `resume_step`."""
        first_hidden = 0 if resume_step == 0 else resume_step + 1
        with disk_faults(f"write TensorBoard events in {folder}"):
            self._writer = SummaryWriter(str(folder), purge_step=first_hidden)

    def write(self, record: Record) -> None:
        """Queues the record's scalars; they reach the disk within two minutes or at close."""
        with disk_faults(f"write TensorBoard events in {self._writer.log_dir}"):
            for tag, value in _scalars(record).items():
                self._writer.add_scalar(tag, value, record.step)

    def close(self) -> None:
        """Writes what is queued."""
        with disk_faults(f"write TensorBoard events in {self._writer.log_dir}"):
            self._writer.close()


def _scalars(record: Record) -> dict[str, float]:
    match record:
        case ValidRecord():
            return {"valid/loss": record.valid_loss} | _term_means(record, "valid_terms")
        case StepRecord():
            loss = {} if record.empty else {"train/loss": record.loss}
            known = {"train/loss_scale": record.loss_scale, "speed/mfu": record.mfu}
            return {
                **loss,
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "train/denominator": record.denominator,
                "speed/tokens_per_second": record.tokens_per_second,
                "speed/seconds": record.seconds,
                **_term_means(record, "terms"),
                **{tag: value for tag, value in known.items() if value is not None},
            }


def _term_means(record: Record, prefix: str) -> dict[str, float]:
    """Terms that had something to learn."""
    return {f"{prefix}/{name}": term.loss for name, term in record.terms.items() if term.denominator != 0}
