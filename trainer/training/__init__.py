"""GRPO: TRL's trainer, the engines that generate for it, and what it does when memory runs out."""
