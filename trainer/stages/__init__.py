"""Several stages of warm-up and GRPO in one run."""
