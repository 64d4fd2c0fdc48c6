"""Where a session's SQL and verdicts run: `Executor.run`, on the event loop or by `Worker.ask` in a process."""
