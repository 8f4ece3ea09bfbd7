"""What `mtrain check` looks at on this machine before a run starts."""
