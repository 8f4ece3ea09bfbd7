"""Starting the ranks of a run on this machine, and watching them; `mtrain.launch(config, ranks)` calls the package."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrain.config import Config
    from mtrain.report.monitor.training_run import TrainingRun


class _CallableModule(ModuleType):
    """Package that is a function as well: a function of this name would hide it, or be hidden by it."""

    def __call__(self, config: "Config", ranks: int) -> "TrainingRun":
        """Calls `mtrain.launch.streamed.launch`."""
        from mtrain.launch.streamed import launch

        return launch(config, ranks)


launch = sys.modules[__name__]
launch.__class__ = _CallableModule
