"""What a step has to be, from its definitions alone, in float64.

Nothing of the trainer is imported here but the configuration, the tokenizer and the errors: masks, positions, labels,
weights, denominators, losses, the model, AdamW, clipping and the learning rate are written a second time, in plain
torch, from the law of losses (docs/same-loss-on-any-layout.md) and from what was published. So a fault of the trainer
that every layout shares is a difference here. `tests/test_architecture.py` holds the imports.
"""
