"""Assignment of samples to rows, and of rows to ranks: arithmetic on lengths, without torch."""
