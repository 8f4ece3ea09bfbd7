"""`Engine`: training steps in a user's own program, on samples that it provides."""
