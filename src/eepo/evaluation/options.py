"""Defines the options of `eepo eval`. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from eepo.types import UserError


def option(default: Any = MISSING, *, help: str, **settings: Any) -> Any:
    """Declare a dataclass field that the command line offers as an option.

    The field's name is the option's name, unless `settings` has a `name`. Its default is the
    option's default; without one the option is required. `argument=True` makes it positional.
    `parse` converts the text on the command line to the field's value. All other settings, such as
    `min`, go to the command line parser.
    """
    return field(default=default, metadata={"help": help, **settings})


def option_name(field: Field[Any]) -> str:
    return "--" + field.metadata.get("name", field.name).replace("_", "-")


def split_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True)
class BenchmarkOptions:
    model: str = option(
        argument=True, help="A Hub name, a model folder, or a run folder (its newest weights)."
    )
    # The default is a text, as on the command line.
    benchmarks: tuple[str, ...] = option(
        "",
        parse=split_names,
        help="Benchmark names or problem files, separated by commas; default for a run: the "
        "evaluation sets of its recipe.",
    )
    data_dir: str | None = option(
        None, help="Folder with the benchmark files; default: the run's, else they are on the Hub."
    )
    num_samples: int = option(
        0, name="samples", min=0, help="Sampled completions per problem, for pass@k."
    )
    temperature: float | None = option(
        None, help="Temperature of the samples; default: the run's, else 1."
    )
    seed: int = option(0, min=0, help="Seed of the samples.")
    max_new_tokens: int | None = option(
        None, min=1, help="Longer completions are cut off; default: the run's, else 4096."
    )
    max_prompt_tokens: int | None = option(
        None,
        min=1,
        help="Problems with a longer prompt are left out, and counted; default: the run's, else "
        "1024.",
    )
    limit: int = option(0, min=0, help="Use only the first N problems per benchmark; 0: all.")
    sample_limit: int = option(
        0,
        min=0,
        help="Sample only the first N of these problems, because samples take much longer than "
        "greedy completions; 0: all.",
    )
    template: str | None = option(
        None,
        help="boxed, chat, or a text with {problem}; default: the run's template, else boxed.",
    )
    stop: str | None = option(
        None, help="Also end a completion at this text; default: the run's, else none."
    )
    reward: str | None = option(
        None,
        help="The grader: math, guess_or_reason, exact or module:function; default: the run's, "
        "else math.",
    )
    max_rows: int | None = option(
        None,
        min=1,
        help="Completions sampled at the same time; default: the run's, else 1024 on a GPU, 128 on "
        "a CPU.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = option(
        None,
        help="Dtype of the weights; default: that of the run's rollouts, else bfloat16 on a GPU, "
        "float32 on a CPU.",
    )
    device: str = option("auto", help="auto, cpu, cuda or cuda:N.")
    revision: str = option("main", help="Revision of a Hub model.")
    trust_remote_code: bool = option(False, help="Allow code from the model repository.")

    def __post_init__(self) -> None:
        if self.sample_limit and not self.num_samples:
            raise UserError(f"--sample-limit {self.sample_limit} needs --samples")
        if self.temperature is None:
            return
        if not 0 < self.temperature < math.inf:
            raise UserError(f"--temperature must be a number > 0, got {self.temperature}")
        if not self.num_samples:
            raise UserError(
                f"--temperature {self.temperature} needs --samples; "
                "the greedy completion has no temperature"
            )


OPTION_NAMES = {
    field.name: option_name(field)
    for field in fields(BenchmarkOptions)
    if not field.metadata.get("argument")
}
