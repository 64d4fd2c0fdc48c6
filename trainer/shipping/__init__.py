"""A trained policy leaves the house: exported, described, pushed to the Hub."""
