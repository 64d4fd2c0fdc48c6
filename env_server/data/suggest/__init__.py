"""Questions proposed for a user's own databases, from the generator's families, each verified before it is shown."""
