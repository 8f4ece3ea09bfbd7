"""Which samples share a row, and which rank computes which row: arithmetic on lengths, without torch."""
