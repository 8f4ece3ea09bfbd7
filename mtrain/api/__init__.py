"""`Engine`: training steps from a program of the user, sample by sample."""
