"""Demonstrations for a warm-up: the oracle's, the noisy expert's, and a policy's own by rejection sampling."""
