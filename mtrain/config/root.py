"""The whole configuration of a run."""

from mtrain.config.data import DataSection
from mtrain.config.layout import LayoutSection
from mtrain.config.loss import LossSection
from mtrain.config.model import ModelSection
from mtrain.config.run import CheckpointSection, MetricsSection, RunSection
from mtrain.config.section import Section
from mtrain.config.train import OptimizerSection, TrainSection, ValidSection


class Config(Section):
    """Sufficient to repeat the run."""

    run: RunSection
    model: ModelSection
    layout: LayoutSection = LayoutSection()
    train: TrainSection
    optimizer: OptimizerSection
    loss: LossSection = LossSection()
    data: DataSection
    valid: ValidSection = ValidSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
