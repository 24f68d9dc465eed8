"""Loads the maths benchmarks by name, from files in a folder or from the Hugging Face hub."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from eepo.config import BENCHMARK_TITLES
from eepo.tasks.files import SUFFIXES, Columns, column_names
from eepo.tasks.problems import Problem, read_problems
from eepo.types import NO_COLUMNS, RowColumns, UserError


@dataclass(frozen=True)
class Benchmark:
    """Describes a benchmark: where it is on the hub, and which file names it may have."""

    name: str
    hub: str
    split: str
    columns: Columns  # on the hub; a file may also have the default columns, problem and answer
    other_stems: tuple[str, ...] = ()  # common file names, in addition to `name`

    @property
    def title(self) -> str:
        return BENCHMARK_TITLES[self.name]

    def stems(self) -> tuple[str, ...]:
        return self.name, *self.other_stems


_QUESTION = Columns(problem="question")

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="minerva_math",
            hub="math-ai/minervamath",
            split="test",
            columns=_QUESTION,
            other_stems=("minervamath", "minerva"),
        ),
        Benchmark(
            name="olympiadbench",
            hub="math-ai/olympiadbench",
            split="test",
            columns=Columns(problem="question", answer="final_answer"),
            other_stems=("olympiadbench_math_en", "olympiad_bench", "OE_TO_maths_en_COMP"),
        ),
        Benchmark(
            name="amc23",
            hub="math-ai/amc23",
            split="test",
            columns=_QUESTION,
            other_stems=("amc2023", "amc_2023"),
        ),
        Benchmark(
            name="aime24",
            hub="HuggingFaceH4/aime_2024",
            split="train",
            columns=Columns(),
            other_stems=("aime2024", "aime_2024"),
        ),
        Benchmark(
            name="aime25",
            hub="math-ai/aime25",
            split="test",
            columns=Columns(),
            other_stems=("aime2025", "aime_2025"),
        ),
        Benchmark(
            name="math500",
            hub="HuggingFaceH4/MATH-500",
            split="test",
            columns=Columns(),
            other_stems=("MATH-500", "math_500"),
        ),
        Benchmark(
            name="gsm8k",
            hub="openai/gsm8k:main",
            split="test",
            columns=_QUESTION,
            other_stems=("gsm8k_test",),
        ),
    )
}


def load_benchmark(
    name: str,
    data_dir: str = "",
    reward_columns: RowColumns = NO_COLUMNS,
) -> list[Problem]:
    """Load a benchmark from a file in `data_dir` if it is given, else from the hub."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise UserError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    if not data_dir:
        columns = replace(benchmark.columns, reward=reward_columns)
        return read_problems(benchmark.hub, columns, benchmark.split)
    folder = Path(data_dir)
    paths = [folder / f"{stem}{suffix}" for stem in benchmark.stems() for suffix in SUFFIXES]
    file = next((path for path in paths if os.path.isfile(path)), None)
    if file is None:
        names = ", ".join(path.name for path in paths)
        raise UserError(f"benchmark {name}: no file in {data_dir}; looked for {names}")
    columns = replace(_columns_of(file, benchmark), reward=reward_columns)
    return read_problems(str(file), columns)


def _columns_of(file: Path, benchmark: Benchmark) -> Columns:
    """Return the hub's columns if the file has them, as a file saved from the hub does."""
    hub, names = benchmark.columns, column_names(file)
    return hub if hub.problem in names and hub.answer in names else Columns()
