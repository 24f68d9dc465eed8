"""EEPO inside verl, for clusters: `python -m eepo.adapters.verl` with verl's own command line and an `eepo.*` section.

verl keeps everything it does: Ray, FSDP2, rollout servers, rewards, checkpoints, loggers. What is added between two
halves of its sampling: a worker that computes θ′ = θ − η ∇L beside θ, verl's own weight push for θ′, and rows that
know their stage. Nothing of verl is imported here, so that reading a recipe needs no verl.
"""
