"""Suites of small test databases that tell a right query from a lucky one (Zhong et al., EMNLP 2020)."""
