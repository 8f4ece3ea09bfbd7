"""Configurations of other programs, translated into ours (`mtrain from`)."""
