"""Whether the training state can still be trusted: nan and inf by name and rank, replicas bit by bit."""
