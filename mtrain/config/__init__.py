"""Configuration of a run. Each key is defined once; reading a configuration does not load torch."""

from mtrain.config.schema.root import Config
from mtrain.config.schema.section import Section

__all__ = ["Config", "Section"]
