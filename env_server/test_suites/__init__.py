"""Variants of a database that tell a right query from a lucky one, and near-misses of a query to choose them by."""
