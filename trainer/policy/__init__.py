"""Policies: loaded by name, quantised, served elsewhere, and the settings they are played with."""
