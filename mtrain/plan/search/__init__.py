"""Which layout a run should have: legal ones, their memory, and what a step of them costs by a stated model."""
