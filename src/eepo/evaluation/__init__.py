"""Sample, grade, estimate. What a policy can do, on prompts it was not trained on."""

from __future__ import annotations

from eepo.evaluation.benchmarks import BenchmarkEvaluation, BenchmarkOptions
from eepo.evaluation.problems import Evaluation, evaluate

__all__ = ["BenchmarkEvaluation", "BenchmarkOptions", "Evaluation", "evaluate"]
