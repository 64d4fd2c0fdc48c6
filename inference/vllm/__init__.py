"""The policy served by vLLM, over HTTP."""
