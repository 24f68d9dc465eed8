"""reasoning-gym, behind a list: which of its data sets may be trained on, and why the others may not.

Its scorers were read one by one (version 0.1.25). Some evaluate what the model wrote as Python or through sympy, which
is running the model's code; some pay for an answer that is always the same; some problems come out differently in
every process, so that a resumed run would not be the same run. A name that is not listed was not read: it is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from types import ModuleType
from typing import Any

from eepo.types import UserError

_READ = """
    ab acre advanced_geometry aiw arc_1d base_conversion basic_arithmetic bf binary_alternation caesar_cipher
    calendar_arithmetic chain_sum circuit_logic color_cube_rotation count_bits count_primes course_schedule cryptarithm
    decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships figlet_font fraction_simplification
    futoshiki game_of_life gcd group_anagrams gsm_symbolic jugs kakurasu knights_knaves largest_island lcm leg_counting
    letter_counting letter_jumble mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack
    number_filtering number_format palindrome_generation path_star polynomial_equations pool_matrix
    power_function prime_factorization products rectangle_count
    rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations simple_geometry
    sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism time_intervals
    tsumego word_sequence_reversal word_sorting zebra_puzzles
"""
ALLOWED = frozenset(_READ.split())

_EVALUATES = "its scorer can evaluate text as Python code"
_MOVES = "its problems differ from one process to the next, so a run could not be resumed"
_NO_GOLD = "it has no gold answer that its own scorer accepts from a file"
_PAYS = "its scorer pays in full for an answer that is always the same"
_HANGS = "some of its problems take minutes to make, or never end"
_LONG = "its answers can be longer than any that is read from a completion"
REFUSED = {
    **dict.fromkeys(
        ("binary_matrix", "bitwise_arithmetic", "countdown", "intermediate_integration", "n_queens", "number_sorting",
         "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"), _EVALUATES
    ),
    **dict.fromkeys(
        ("codeio", "isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"), _MOVES
    ),
    **dict.fromkeys(
        ("arc_agi", "boxnet", "graph_color", "propositional_logic", "rearc", "rubiks_cube", "rush_hour"), _NO_GOLD
    ),
    **dict.fromkeys(("coin_flip", "complex_arithmetic", "game_of_life_halting"), _PAYS),
    **dict.fromkeys(("palindrome_partitioning", "tower_of_hanoi"), _LONG),
    **dict.fromkeys(("number_sequence", "quantum_lock"), _HANGS),
    "composite": "it is a mixture of other data sets; name one of them",
}  # fmt: skip


def check(name: str) -> None:
    """Raise a line that says why `name` may not be used, if it may not."""
    if name in REFUSED:
        raise UserError(f'task.dataset = "{name}" of reasoning-gym is refused: {REFUSED[name]}')
    if name not in ALLOWED:
        raise UserError(f'task.dataset = "{name}" must be one of {", ".join(sorted(ALLOWED))}')


def package() -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise UserError(
            'task.name = "reasoning_gym" needs: pip install "eepo[reasoning_gym]"'
        ) from error


def open_dataset(name: str, size: int, seed: int) -> Any:
    """A generator with `score_answer` and `size` entries, `dataset[index]`. Entries of one seed are always the same."""
    check(name)
    return package().create_dataset(name, size=size, seed=seed)


def entry_at(dataset: Any, index: int) -> dict[str, Any]:
    """{"question", "answer", "metadata"}. Some generators print while they work."""
    with contextlib.redirect_stdout(io.StringIO()):
        return dataset[index]
