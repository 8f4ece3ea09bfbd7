"""The only package that imports megatron-core.

The CPU emulation has to be in place before megatron-core is first imported, so it is installed here.
"""

import warnings

from mtrain.base.imports import without_trackers
from mtrain.mcore.distributed import cpu

# What megatron-core and torch warn about here is decided by this package (missing optional packages, names that are
# deprecated between the two), not by the user, who would read it once for each rank.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
with without_trackers():
    cpu.install()
    import megatron.core  # noqa: F401
