"""Data sets: questions about SQLite databases, with their gold SQL, split by database."""
