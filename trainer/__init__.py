"""Training: the rollout client, rewards, GRPO, warm-up, evaluation and the report."""
