"""All sections of a configuration, and values that follow from several of them."""

from mtrain.config import derived
from mtrain.config.schema.adapter import AnyAdapter
from mtrain.config.schema.data import AnyData
from mtrain.config.schema.layout import LayoutSection
from mtrain.config.schema.loss import LossSection
from mtrain.config.schema.model import ModelSection
from mtrain.config.schema.run import CheckpointSection, MetricsSection, RunSection, WatchSection
from mtrain.config.schema.section import Section
from mtrain.config.schema.train import AnyOptimizer, EvalSection, Fp8Recipe, TrainSection, ValidSection


class Sections(Section):
    """Sections of a configuration; `Config` adds the rules between them."""

    run: RunSection
    model: ModelSection
    adapter: AnyAdapter | None = None
    """Adapters trained on a frozen model; null: the model itself is trained."""
    layout: LayoutSection = LayoutSection()
    train: TrainSection
    optimizer: AnyOptimizer
    """Optimizer, and the learning rate as a function of the step."""
    loss: LossSection = LossSection()
    data: AnyData
    """Training and validation samples. indexed: Megatron's .bin/.idx corpora; sft: records such as conversations; mock:
    arithmetic, for trials."""
    valid: ValidSection = ValidSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    watch: WatchSection = WatchSection()

    @property
    def is_layout_dependent(self) -> bool:
        """Whether results depend on the layout and micro-batch size: by a feature's definition, dropout's random
        numbers, or fp8 scales in TransformerEngine's layers."""
        keys = derived.layout_dependent_keys(self.model, self.loss) or self.dropout_keys
        return bool(keys) or (self.train.fp8 is not None and not self.has_own_fp8)

    @property
    def has_own_fp8(self) -> bool:
        """Whether our own layers multiply in fp8, by scales that no layout changes; else TransformerEngine's do."""
        return self.train.fp8 is not None and self.model.backend == "torch"

    @property
    def fp8_recipe(self) -> Fp8Recipe:
        """How products in fp8 are scaled."""
        return self.train.fp8_recipe or ("rowwise" if self.has_own_fp8 else "tensorwise")

    @property
    def fuses_weight_gradients(self) -> bool:
        """Whether products of our own linear layers add weight gradients directly to their float32 buffers: as
        `model.megatron` says, else unless another feature hides a weight from its gradient. Sharded weights have no
        such buffers."""
        choice = self.model.megatron.get("gradient_accumulation_fusion")
        if choice is not None:
            return bool(choice)
        return self.train.compile != "layers" and self.train.offload_layers is None

    @property
    def dropout_keys(self) -> list[str]:
        """Keys of dropouts above 0."""
        return derived.above_zero(derived.DROPOUT_KEYS, {"model": self.model, "adapter": self.adapter})

    @property
    def row_width(self) -> int:
        """Number of positions in a row, which holds one sample or several packed ones."""
        return derived.row_width(self.train, self.data)

    @property
    def sequences_per_sample(self) -> int:
        """Number of sequences in a sample: two if answers are compared, otherwise one."""
        return 1 if derived.compared(self.loss, self.data) is None else 2

    @property
    def order_seed(self) -> int:
        """Seed of the order of samples."""
        return self.train.seed if self.data.seed is None else self.data.seed

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences in a step; meaningless if `steps_count_rows`."""
        return self.train.global_batch_size * self.sequences_per_sample

    @property
    def steps_count_rows(self) -> bool:
        """Whether train.global_batch_size counts packed rows instead of samples."""
        return self.data.packing is not None and self.data.packing.batch == "rows"
