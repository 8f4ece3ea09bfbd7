"""Ranks: process groups, collectives, and how ranks find each other.

The CPU emulation must be installed before megatron-core is first imported, so it is installed here.
"""

from mtrain.base.ground import require_ground
from mtrain.base.imports import ignore_warnings_of_megatron, without_trackers

require_ground()  # other versions of torch or megatron-core would change the numbers of a run, or fail
from mtrain.core.ranks import cpu  # noqa: E402

ignore_warnings_of_megatron()
with without_trackers():
    cpu.install()
    import megatron.core  # noqa: F401
