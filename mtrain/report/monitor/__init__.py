"""Monitors runs: `mtrain status` and the page of `mtrain report`, from run folders that may be in use."""
