"""Engines that sample. The trainer knows only `protocols.RolloutEngine`."""
