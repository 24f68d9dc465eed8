"""Everything that is more than one run, and the checks before a run."""
