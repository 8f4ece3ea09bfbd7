"""State that a GPU can do without for a while, kept in memory of the host."""
