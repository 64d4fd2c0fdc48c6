"""The question families: each draws a question and its gold SQL from a database, or None if it finds none."""
