"""Hosts: other people's trainers, running EEPO. Each takes the mathematics from `algorithm.py`; none knows our own."""
