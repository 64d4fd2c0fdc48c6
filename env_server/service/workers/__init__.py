"""A server's processes: one worker that serves, and the supervisor that keeps several."""
