"""Check `mtrain verify rollout`: log-probabilities of an inference engine, of the trainer and of the reference."""
