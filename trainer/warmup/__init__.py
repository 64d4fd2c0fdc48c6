"""Supervised warm-up on play that the environment has verified."""
