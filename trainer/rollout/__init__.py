"""Episodes, many at once: environments, players, and the token-exact rows that are trained on."""
