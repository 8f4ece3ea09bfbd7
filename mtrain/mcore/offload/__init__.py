"""What a GPU can do without for a while, held in memory of the host."""
