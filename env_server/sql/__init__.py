"""SQLite under control: the sandbox, what may run in it, what a database holds, and how a result reads."""
