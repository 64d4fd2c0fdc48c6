"""Evaluation: the environment, the rollout client and the prompts of training on unseen questions."""
