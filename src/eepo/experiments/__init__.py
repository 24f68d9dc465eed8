"""Runs comparisons and sweeps of several runs, and checks a recipe before a run."""
