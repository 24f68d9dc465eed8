"""Graders. One file a reward; `REWARDS` says which one a task uses."""

from __future__ import annotations

from eepo.rewards.countdown import CountdownReward

REWARDS = {"countdown": CountdownReward}
