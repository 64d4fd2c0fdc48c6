"""SQLEnv: a question about a hidden database, answered by DESCRIBE, SAMPLE, QUERY and ANSWER.

This package is the environment alone. It imports neither torch nor transformers, nor the packages
`inference` and `trainer`.
"""
