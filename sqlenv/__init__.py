"""SQLEnv: what a program imports, and the `sqlenv` command (`sqlenv/cli.py`). Importing it loads nothing heavy."""
