"""An engine without a model: the latencies of a batched generation server, and the words of a script."""
