"""`sqlenv data`: its subcommands, and what they print and write."""
