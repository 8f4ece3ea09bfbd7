"""Where text and tokens come from: one file a format."""
