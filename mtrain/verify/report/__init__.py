"""Reports of a check for readers: on the terminal, and as a page."""
