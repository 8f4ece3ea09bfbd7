"""Low-rank adapters beside frozen layers."""
