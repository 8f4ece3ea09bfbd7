"""The sections of a configuration: their keys, units and rules."""
