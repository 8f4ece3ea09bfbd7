"""Low-rank adapters of frozen layers."""
