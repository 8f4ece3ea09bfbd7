"""Records of a run while it trains: events, records of its steps, and their sinks."""
