"""What runs inside vLLM's processes. This folder alone is on their PYTHONPATH, so that nothing of the environment
that SQLEnv is installed in reaches theirs.
"""
