r"""LaTeX answers in one spelling, and cut at their top level. Pure text: nothing here knows what an answer means."""

from __future__ import annotations

import re

ROW = " ⏎ "  # the end of a matrix row: two backslashes would be read as the start of a command

_FRAMES = re.compile(r"\\[()\[\]]|(?<!\\)\$")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![A-Za-z])\.?")
_SPACES = re.compile(
    r"\\(?:[,;:! ]|q?quad(?![A-Za-z])|hspace\{[^{}]*\}|displaystyle|textstyle|phantom|allowbreak)|~|\s+"
)
_THIN = re.compile(r"(?<=\d)(?:,\\!|\{,\}|\\,|\\!,?)(?=\d)")
_FONTS = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathcal|boldsymbol|bm|operatorname\*?|mathop|ensuremath|boxed|fbox)\b"
)
_TEXT = re.compile(
    r"\\(?:mbox|mathrm|textbf|textit|textrm|textnormal|texttt|rm|hbox|text)\s*(?=\{)"
)
_UPRIGHT = re.compile(r"\\mathrm\s*\{\s*([ied])\s*\}")  # constants and differentials, not units
_COLOURS = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_SCALE = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALES = re.compile(
    r"(?<=\d)\s*(?:\\text\s*\{\s*(thousand|million|billion|trillion)\s*\}|(thousand|million|billion|trillion)\b)"
)
_BARE_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9A-Za-z])\s*(\{[^{}]*\}|[0-9A-Za-z])")
_BARE_ROOT = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_SHORT_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_NAMES = {
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
_SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
        "²": "^2", "³": "^3", "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ", "∈": r"\in ", "≈": r"\approx ", "％": "%",
        "\u00a0": " ", "\u200b": "", "\u200c": "", "\u200d": "", "\ufeff": "", "\u2060": "",
        "½": r"\frac{1}{2}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    }
)  # fmt: skip
_NAME = re.compile(
    "|".join(rf"{re.escape(name)}(?![A-Za-z])" for name in sorted(_NAMES, key=len, reverse=True))
)


def plain(text: str) -> str:
    r"""One spelling for what LaTeX writes in many: fractions, spaces, sizes, fonts, frames. Keeps `\$` and `\text`."""
    text = (
        re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text).translate(_SIGNS).replace("√", r"\sqrt ")
    )
    text = _FRAMES.sub(" ", text.replace("\\\\", ROW))
    text = _THIN.sub("", text)
    text = _SIZES.sub("", text)
    text = _SPACES.sub(" ", text)
    text = _NAME.sub(lambda match: _NAMES[match[0]], text)
    text = _COLOURS.sub("", _TEXT.sub(r"\\text", _FONTS.sub("", _UPRIGHT.sub(r"\1", text))))
    text = _SCALES.sub(lambda match: rf"\times 10^{{{_SCALE[match[1] or match[2]]}}}", text)
    text = _BARE_FRACTION.sub(lambda match: rf"\frac{_braced(match[1])}{_braced(match[2])}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ", text)
    text = re.sub(r"\^\s*\{?((?:\s*\\prime)+)\s*\}?", lambda match: "'" * match[1].count("p"), text)
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    text = _whole(re.sub(r" +", " ", text).strip(" ,;:⏎*"))
    text = text.rstrip(" .,;:") if not text.endswith(r"\.") else text
    return text if re.match(r"\.\d", text) else text.lstrip(". ")


def _whole(text: str) -> str:
    r"""What the text is as a whole: \text{5 cm} holds a quantity, \{x \mid x > 3\} is its condition."""
    text = re.sub(r"\b([ap])\. ?m\b\.?", r"\1m", text)
    if (match := re.fullmatch(r"\\text\{([^{}]*)\}", text)) and re.search(r"\d|=", match[1]):
        text = match[1].strip(" .,;:")
    if match := re.fullmatch(r"\\\{ ?[A-Za-z](?: ?\\in ?\S+)? ?(?:\\mid|\||:) ?(.*?) ?\\\}", text):
        text = match[1]
    text = re.sub(
        r"\\mathbb ?(?:\{R\}|R)|\\text\{ ?(?:all )?real numbers ?\}",
        lambda _: r"(-\infty,\infty)",
        text,
    )
    return r"\emptyset" if re.fullmatch(r"\\\{ ?\\\}", text) else text


def squeeze(text: str) -> str:
    """Without spaces, but for one between two digits or two letters, where it means something."""
    return re.sub(
        r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])",
        "",
        re.sub(r"(?<=[A-Za-z]) (?=\d)|(?<=\d) (?=[A-Za-z])", "", text),
    )


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Cut at the separators that stand outside every bracket."""
    parts, start, depth, place = [], 0, 0, 0
    while place < len(text):
        if depth == 0 and (match := separator.match(text, place)) and match.end() > place:
            parts.append(text[start:place])
            start = place = match.end()
            continue
        if text[place] == "\\":
            place += 1
            depth += {"{": 1, "}": -1}.get(text[place : place + 1], 0)
        elif text[place] in "([{":
            depth += 1
        elif text[place] in ")]}":
            depth -= 1
        place += 1
    return [part.strip() for part in [*parts, text[start:]]]


def brackets(text: str) -> tuple[str, str] | None:
    r"""The outermost pair, such as "(]" or "\{\}", and what it holds; None if the text is not one bracket."""
    for opened, closed in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
        if (
            text.startswith(opened)
            and text.endswith(closed)
            and _closes_last(text[len(opened) : -len(closed)])
        ):
            return opened + closed, text[len(opened) : -len(closed)].strip()
    if len(text) >= 2 and text[0] in "([" and text[-1] in ")]" and _closes_last(text[1:-1]):
        return text[0] + text[-1], text[1:-1].strip()
    return None


def nesting(text: str) -> int:
    """How deep its brackets go."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _closes_last(inner: str) -> bool:
    """Whether brackets inside are balanced by themselves: not so in `(1,2),(3,4)`. Kinds may mix: `[1,2)`."""
    depth, place = 0, 0
    while place < len(inner):
        if inner[place] == "\\":
            place += 1
            depth += {"{": 1, "}": -1}.get(inner[place : place + 1], 0)
        else:
            depth += (inner[place] in "([{") - (inner[place] in ")]}")
        if depth < 0:
            return False
        place += 1
    return depth == 0


def _braced(part: str) -> str:
    return part if part.startswith("{") else "{" + part + "}"
