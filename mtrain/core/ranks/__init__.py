"""Ranks: groups, collectives, and how ranks find each other.

The CPU emulation has to be in place before megatron-core is first imported, so it is installed here.
"""

from mtrain.base.ground import require_ground
from mtrain.base.imports import ignore_warnings_of_megatron, without_trackers

require_ground()  # another version would change the run's numbers, or end in a traceback
from mtrain.core.ranks import cpu  # noqa: E402

ignore_warnings_of_megatron()
with without_trackers():
    cpu.install()
    import megatron.core  # noqa: F401
