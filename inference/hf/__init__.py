"""The policy served by transformers, in the trainer's process."""
