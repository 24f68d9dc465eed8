r"""Normalises LaTeX answers to one spelling and splits them at their top level.

Works on text alone. Nothing here knows what an answer means.
"""

from __future__ import annotations

import re

# Marks the end of a matrix row. Two backslashes would be read as the start of a command.
ROW_END = " ⏎ "

_DELIMITERS = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_DOLLAR = re.compile(r"(?<!\\)\$")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\.?")
_SPACES = re.compile(
    r"\\(?:[,;:! ]|q?quad(?![A-Za-z])|hspace\{[^{}]*\}|displaystyle|textstyle|phantom|allowbreak)"
    r"|~|\s+"
)
_COLON = re.compile(r"(?:\\math(?:bin|rel|punct|ord))?\s*\{\s*:\s*\}")
_DIGIT_GROUPING = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\,|\\!,?)(?=\d)")
_FONTS = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathcal|boldsymbol|bm|operatorname\*?|mathop|ensuremath|boxed|fbox)\b"
)
_TEXT = re.compile(
    r"\\(?:mbox|mathrm|textbf|textit|textrm|textnormal|texttt|rm|hbox|text)\s*(?=\{)"
)
# Upright constants and differentials. Other \mathrm letters may be units.
_UPRIGHT = re.compile(r"\\mathrm\s*\{\s*([ied])\s*\}")
_COLOURS = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_POWERS_OF_TEN = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMBER_WORD = "(thousand|million|billion|trillion)"
_NUMBER_WORDS = re.compile(rf"(?<=\d)\s*(?:\\text\s*\{{\s*{_NUMBER_WORD}\s*\}}|{_NUMBER_WORD}\b)")
_BARE_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9A-Za-z])\s*(\{[^{}]*\}|[0-9A-Za-z])")
_BARE_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_SHORT_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_COMMANDS = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\leqslant": r"\le",
    r"\geqslant": r"\ge",
    r"\leq": r"\le",
    r"\geq": r"\ge",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\%": "%",
    r"\colon": ":",
    r"\degree": r"^\circ",
    r"\textdegree": r"^\circ",
    r"\cup": " ∪ ",
    r"\varnothing": r"\emptyset",
    r"\R": r"(-\infty,\infty)",
    r"\wedge": r"\land",
}
_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "±": r"\pm ", "％": "%",
        "≤": r"\le ", "≥": r"\ge ", "∈": r"\in ", "≈": r"\approx ", "∞": r"\infty ",
        "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
        "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
        "\u00a0": " ", "\u200b": "", "\u200c": "", "\u200d": "", "\ufeff": "", "\u2060": "",
    }
)  # fmt: skip
_COMMAND = re.compile(
    "|".join(rf"{re.escape(name)}(?![A-Za-z])" for name in sorted(_COMMANDS, key=len, reverse=True))
)


def normalise_latex(text: str) -> str:
    r"""Rewrite the many LaTeX spellings of an answer as one.

    Covers fractions, roots, spaces, bracket sizes, fonts, math delimiters and Unicode signs.
    Keeps `\$` and `\text`, which carry meaning.
    """
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = text.translate(_CHARACTERS).replace("√", r"\sqrt ")
    if len(_DOLLAR.findall(text)) == 1:  # a currency, not a math delimiter
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text)
    text = _DELIMITERS.sub(" ", text.replace("\\\\", ROW_END))
    text = _DIGIT_GROUPING.sub("", _COLON.sub(":", text))
    text = _SIZES.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _COMMAND.sub(lambda match: _COMMANDS[match[0]], text)
    text = _FONTS.sub("", _UPRIGHT.sub(r"\1", text))
    text = _COLOURS.sub("", _TEXT.sub(r"\\text", text))
    text = _NUMBER_WORDS.sub(_power_of_ten, text)
    text = _BARE_FRACTION.sub(lambda match: rf"\frac{_braced(match[1])}{_braced(match[2])}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ", text)
    text = re.sub(r"\^\s*\{?((?:\s*\\prime)+)\s*\}?", lambda match: "'" * match[1].count("p"), text)
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    text = _unwrap(re.sub(r" +", " ", text).strip(" ,;:⏎*"))
    text = text.rstrip(" .,;:") if not text.endswith(r"\.") else text
    return text if re.match(r"\.\d", text) else text.lstrip(". ")


def _power_of_ten(match: re.Match[str]) -> str:
    return rf"\times 10^{{{_POWERS_OF_TEN[match[1] or match[2]]}}}"


def _unwrap(text: str) -> str:
    r"""Remove what wraps a whole answer.

    \text{5 cm} becomes `5 cm`, and \{x \mid x > 3\} becomes `x > 3`.
    Also give one spelling to a.m. and p.m., the real numbers and the empty set.
    """
    text = re.sub(r"\b([ap])\. ?m\b\.?", r"\1m", text)
    if (match := re.fullmatch(r"\\text\{([^{}]*)\}", text)) and re.search(r"\d|=", match[1]):
        text = match[1].strip(" .,;:")
    if match := re.fullmatch(r"\\\{ ?[A-Za-z](?: ?\\in ?\S+)? ?(?:\\mid|\||:) ?(.*?) ?\\\}", text):
        text = match[1]
    real_numbers = r"\\mathbb ?(?:\{R\}|R)|\\text\{ ?(?:all )?real numbers ?\}"
    text = re.sub(real_numbers, lambda _: r"(-\infty,\infty)", text)
    return r"\emptyset" if re.fullmatch(r"\\\{ ?\\\}", text) else text


def remove_spaces(text: str) -> str:
    """Remove spaces except between two digits or two letters, where they separate two symbols."""
    text = re.sub(r"(?<=[A-Za-z]) (?=\d)|(?<=\d) (?=[A-Za-z])", "", text)
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", text)


def split_top_level(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at the separators that are outside of all brackets."""
    parts, start, depth, index = [], 0, 0, 0
    while index < len(text):
        if depth == 0 and (match := separator.match(text, index)) and match.end() > index:
            parts.append(text[start:index])
            start = index = match.end()
            continue
        if text[index] == "\\":
            index += 1
            depth += {"{": 1, "}": -1}.get(text[index : index + 1], 0)
        elif text[index] in "([{":
            depth += 1
        elif text[index] in ")]}":
            depth -= 1
        index += 1
    return [part.strip() for part in [*parts, text[start:]]]


def outer_brackets(text: str) -> tuple[str, str] | None:
    r"""Return the bracket pair around the whole text, such as "(]" or "\{\}", and its contents.

    Return None if no single pair encloses the text.
    """
    for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and _is_balanced(inner):
            return opening + closing, inner.strip()
    if len(text) >= 2 and text[0] in "([" and text[-1] in ")]" and _is_balanced(text[1:-1]):
        return text[0] + text[-1], text[1:-1].strip()
    return None


def bracket_depth(text: str, opening: str = "([{", closing: str = ")]}") -> int:
    """Return how deeply brackets are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in opening) - (character in closing)
        deepest = max(deepest, depth)
    return deepest


def _is_balanced(inner: str) -> bool:
    """Return whether the brackets are balanced. `1,2),(3,4` is not.

    Any opening bracket matches any closing one: half-open intervals such as `[1,2)` mix them.
    """
    depth, index = 0, 0
    while index < len(inner):
        if inner[index] == "\\":
            index += 1
            depth += {"{": 1, "}": -1}.get(inner[index : index + 1], 0)
        else:
            depth += (inner[index] in "([{") - (inner[index] in ")]}")
        if depth < 0:
            return False
        index += 1
    return depth == 0


def _braced(part: str) -> str:
    return part if part.startswith("{") else "{" + part + "}"
