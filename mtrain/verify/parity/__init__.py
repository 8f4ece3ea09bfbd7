"""`mtrain verify parity`: every layout against one process and the reference."""
