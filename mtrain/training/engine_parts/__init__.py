"""What `Engine` is made of beside the parts of a run: its results, the weights that it hands on."""
