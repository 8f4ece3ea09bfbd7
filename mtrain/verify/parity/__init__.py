"""Check `mtrain verify parity`: compares layouts with one process in float64."""
