"""Lists which data sets of reasoning-gym may be used, and why the others may not.

All scorers of version 0.1.25 were reviewed. A data set is refused for one of these reasons:
- Its scorer evaluates the answer as Python code or with SymPy, which runs code that a model wrote.
- Its scorer gives the full score to a constant answer.
- Its problems differ between processes, so a resumed run would not continue the same run.
- It has no usable gold answers, or generating its problems may never end.

A data set that is not listed here was not reviewed and is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from types import ModuleType
from typing import Any

from eepo.types import UserError

_REVIEWED = """
    ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf binary_alternation
    caesar_cipher calendar_arithmetic chain_sum circuit_logic color_cube_rotation count_bits
    count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum dice
    emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life
    gcd group_anagrams gsm_symbolic jugs kakurasu knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid
    needle_haystack number_filtering number_format palindrome_generation path_star
    polynomial_equations pool_matrix power_function prime_factorization products rectangle_count
    rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations
    simple_geometry sokoban spell_backward string_manipulation string_splitting string_synthesis
    sudoku survo syllogism time_intervals tsumego word_sequence_reversal word_sorting
    zebra_puzzles
"""
ALLOWED = frozenset(_REVIEWED.split())

_EVALUATES = "its scorer can evaluate text as Python code"
_NOT_REPRODUCIBLE = "its problems differ between processes, so a run could not be resumed"
_NO_GOLD = "it has no gold answer that its own scorer accepts from a file"
_CONSTANT_ANSWER = "its scorer gives the full score to a constant answer"
_SLOW = "its generator takes minutes for some problems, or never ends"
_LONG = "its answers can be longer than the longest answer that is read from a completion"
REFUSED = {
    **dict.fromkeys(
        (
            "binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration",
            "n_queens", "number_sorting", "polynomial_multiplication", "puzzle24",
            "simple_integration", "spiral_matrix", "string_insertion",
        ),
        _EVALUATES,
    ),
    **dict.fromkeys(
        (
            "codeio", "isomorphic_strings", "knight_swap", "list_functions", "ransom_note",
            "word_ladder",
        ),
        _NOT_REPRODUCIBLE,
    ),
    **dict.fromkeys(
        (
            "arc_agi", "boxnet", "graph_color", "propositional_logic", "rearc", "rubiks_cube",
            "rush_hour",
        ),
        _NO_GOLD,
    ),
    **dict.fromkeys(("coin_flip", "complex_arithmetic", "game_of_life_halting"), _CONSTANT_ANSWER),
    **dict.fromkeys(("palindrome_partitioning", "tower_of_hanoi"), _LONG),
    **dict.fromkeys(("number_sequence", "quantum_lock"), _SLOW),
    "composite": "it is a mixture of other data sets; name one of them",
}  # fmt: skip


def check_allowed(name: str) -> None:
    """Raise a UserError with the reason if the data set `name` may not be used."""
    if name in REFUSED:
        raise UserError(f'task.dataset = "{name}" of reasoning-gym is refused: {REFUSED[name]}')
    if name not in ALLOWED:
        raise UserError(f'task.dataset = "{name}" must be one of {", ".join(sorted(ALLOWED))}')


def import_package() -> ModuleType:
    """Import reasoning_gym, or raise a UserError that says how to install it."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(
            'task.name = "reasoning_gym" needs: pip install "eepo[reasoning_gym]"'
        ) from error


def open_dataset(name: str, size: int, seed: int) -> Any:
    """Open a data set with `size` entries and its `score_answer`.

    The entries are a pure function of the seed.
    """
    check_allowed(name)
    return import_package().create_dataset(name, size=size, seed=seed)


def read_entry(dataset: Any, index: int) -> dict[str, Any]:
    """Generate an entry: {"question", "answer", "metadata"}.

    Some generators print while they work, so the standard output is discarded.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        return dataset[index]
