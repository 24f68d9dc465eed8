"""Rollout engines sample completions. The trainer knows only `protocols.RolloutEngine`."""
