"""EEPO inside verl, for clusters: `python -m eepo.adapters.verl` with verl's command line.

EEPO's knobs are a section `eepo.*` of that command line. verl provides Ray, FSDP2, rollout servers,
rewards, checkpoints and loggers. This adapter adds stages to the rollout: a worker that computes
θ′ = θ − η ∇L next to θ, a push of θ′ with verl's weight sync, and rows that know their stage.
This module does not import verl, so that `eepo export-verl` works without it.
"""
