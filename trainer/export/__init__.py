"""A trained policy as a plain checkpoint: exported, described, pushed to the Hub."""
