"""The maths benchmarks by name: as files of a folder, or as hub data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eepo.tasks.files import SUFFIXES, Columns, column_names
from eepo.tasks.problems import Problem, read_problems
from eepo.types import UserError


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    hub: str
    split: str
    columns: Columns  # of the hub's set; a file may have these or the usual problem and answer
    other_stems: tuple[str, ...] = ()  # file names beside `name` that people use

    def stems(self) -> tuple[str, ...]:
        return self.name, *self.other_stems


_QUESTION = Columns(problem="question")

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "minerva_math",
            "Minerva Math",
            "math-ai/minervamath",
            "test",
            _QUESTION,
            ("minervamath", "minerva"),
        ),
        Benchmark(
            "olympiadbench",
            "OlympiadBench",
            "math-ai/olympiadbench",
            "test",
            Columns(problem="question", answer="final_answer"),
            ("olympiadbench_math_en", "olympiad_bench", "OE_TO_maths_en_COMP"),
        ),
        Benchmark("amc23", "AMC 23", "math-ai/amc23", "test", _QUESTION, ("amc2023", "amc_2023")),
        Benchmark(
            "aime24",
            "AIME 24",
            "HuggingFaceH4/aime_2024",
            "train",
            Columns(),
            ("aime2024", "aime_2024"),
        ),
        Benchmark(
            "aime25", "AIME 25", "math-ai/aime25", "test", Columns(), ("aime2025", "aime_2025")
        ),
        Benchmark(
            "math500",
            "MATH-500",
            "HuggingFaceH4/MATH-500",
            "test",
            Columns(),
            ("MATH-500", "math_500"),
        ),
        Benchmark("gsm8k", "GSM8K", "openai/gsm8k:main", "test", _QUESTION, ("gsm8k_test",)),
    )
}


def load_benchmark(name: str, data_dir: str = "") -> list[Problem]:
    """From `data_dir` if one is given, else from the hub."""
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        raise UserError(f"no benchmark is called {name!r}; there are {', '.join(BENCHMARKS)}")
    if not data_dir:
        return read_problems(benchmark.hub, benchmark.columns, benchmark.split)
    places = [
        Path(data_dir) / f"{stem}{suffix}" for stem in benchmark.stems() for suffix in SUFFIXES
    ]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        looked = ", ".join(place.name for place in places)
        raise UserError(f"benchmark {name}: no file in {data_dir}; looked for {looked}")
    return read_problems(str(file), _columns_of(file, benchmark))


def _columns_of(file: Path, benchmark: Benchmark) -> Columns:
    """A file saved from the hub keeps the hub's columns."""
    hub, names = benchmark.columns, column_names(file)
    return hub if hub.problem in names and hub.answer in names else Columns()
