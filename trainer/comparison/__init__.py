"""`sqlenv compare`: two evaluations, or two runs, question by question."""
