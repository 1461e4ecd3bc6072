"""Baselines, statistics and plots; nothing else in the package imports it."""
