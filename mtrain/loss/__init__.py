"""Names of version 0.2, for one release: programs import these from `mtrain`."""
