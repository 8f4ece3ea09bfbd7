"""Keys of other programs, with ours, for the messages about unknown keys."""

from mtrain.config.megatron_fields import TYPED_KNOBS
from mtrain.config.tables import by_name, table

_MEGATRON_LM, _HINTS = table("megatron_lm"), table("hints")
_ROWS = {
    name: row if isinstance(row, str) else row["to"]
    for section in ("switches", "rows", "latent_attention", "delta_net", "experts")
    for name, row in _MEGATRON_LM[section].items()
}
OURS = {
    **TYPED_KNOBS,
    **{name.replace("-", "_"): key for name, key in _ROWS.items()},
    **by_name(_HINTS["ours"]),
}
"""Name in another program -> our equivalent, in any section."""
SYNONYMS = {key: frozenset(names.split()) for key, names in _HINTS["synonyms"].items()}
"""Our key -> its synonyms, in sections that have the key."""
FOLLOWING = by_name(_HINTS["following"])
"""Name in another program without an equivalent -> our keys that its value follows from."""
MISSING = by_name(_HINTS["missing"])
"""Name of something that nothing here does -> what to do instead."""
