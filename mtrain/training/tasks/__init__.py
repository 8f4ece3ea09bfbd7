"""Tasks of lm-eval on any layout: a model's answers to requests, ranks that follow the first, tasks during training."""
