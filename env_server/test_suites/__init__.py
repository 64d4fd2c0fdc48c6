"""Variants of a database that tell a right query from a lucky one, and the neighbour queries to choose them by.

Neighbour queries are those of Zhong et al. (EMNLP 2020): the gold with one piece changed.
"""
