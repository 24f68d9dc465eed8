"""eepo: reinforcement learning with verifiable rewards that explores. See `algorithm.py` for the whole method."""

__version__ = "0.1.0"
