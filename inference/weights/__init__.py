"""Weight sync: how a trained policy reaches the servers that generate with it."""
