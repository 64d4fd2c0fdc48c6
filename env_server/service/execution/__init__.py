"""Where a session's SQL and verdicts run: at once on the event loop, or in query processes."""
