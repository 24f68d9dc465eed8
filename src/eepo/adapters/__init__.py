"""Run EEPO inside other trainers: TRL and verl.

The algorithm's functions come from `eepo.algorithm`; `eepo.trainer` is not used here.
"""
