"""The flags of `sqlenv train` and `sqlenv warmup`: TRL's, ours, their defaults and what may be combined."""
