"""One script per claim. Each prints one JSON line."""
