r"""Units of measurement: what is written around a number and is not part of it.

The policy, in one place:
- A unit is text after a number (`\text{ cm}^2`, `^\circ`, a known word such as `cm` or `degrees`), or `\$` before it.
  A bare single letter is a variable, never a unit.
- A unit on one side only is dropped: the problem says in which unit to answer.
- Known units on both sides must be the same, powers included; nothing is converted (100 cm is not 1 m). Words that
  are no unit of measurement (`7 \text{ ways}`) do not count.
- Percent: 50 % is 50 (asked for a percentage) and is 0.5 (it is the same number).
"""

from __future__ import annotations

import re

_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inches inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram",
    "lb": "pound lbs",
    "oz": "ounce",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "deg": "degree °",
    "rad": "radian",
    "$": "dollar usd",
    "¢": "cent",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "gal": "gallon",
    "acre": "acre",
    "mph": "mph",
    "km/h": "kph kmh kmph",
    "m/s": "mps",
    "unit": "unit",
    "am": "am",
    "pm": "pm",
    "%": "percent",
    "j": "joule",
    "kj": "kilojoule",
    "n": "newton",
    "w": "watt",
    "kw": "kilowatt",
    "v": "volt",
    "mv": "millivolt",
    "hz": "hertz",
    "khz": "kilohertz",
    "pa": "pascal",
    "kpa": "kilopascal",
    "k": "kelvin",
    "ev": "electronvolt",
    "degc": "celsius",
    "degf": "fahrenheit",
}
_KNOWN = {word: unit for unit, words in _SPELLINGS.items() for word in [unit, *words.split()]}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_BARE_WORDS = "|".join(
    sorted((word for word in _KNOWN if len(word) > 1 and word.isalpha()), key=len, reverse=True)
)
# Words that say more than a unit: with one of them, what stands after a number is not dropped.
_SAYS_MORE = re.compile(
    r"\b(?:or|and|not|no|times|plus|minus|over|is|are|was|if|than|hundred|thousand|million|billion|dozen|half|to)\b"
)
_OVER = re.compile(r"\\text\{([^{}^]*[A-Za-z])[ .]+([A-Za-z]+)\s*\^\s*\{\s*-\s*([123])\s*\}\s*\}")
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_AFTER = re.compile(
    r"\\text\{(?P<words>[^{}]{1,60})\}\s*(?:\^\s*\{?(?P<power>[23])\}?)?"
    r"|\^\\circ\s*(?:\\text\{\s*)?(?P<scale>[CF]?)\s*\}?"
    r"|(?P<percent>%)"
    rf"|\s+(?P<bare>(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{_BARE_WORDS})s?)(?:\s*\^\s*\{{?(?P<bare_power>[23])\}}?)?"
    r"|\s+(?P<prose>[A-Za-z]{3,20}(?: [A-Za-z]{1,20}){0,4})",
    re.IGNORECASE,
)


def split_unit(text: str) -> tuple[str, str | None]:
    r"""The number and its unit: ("15", "cm^2"), ("50", "%"), or the text as it is and None."""
    stripped = _OVER.sub(_slash, text.strip())
    dollars = re.match(r"([-+]?)\s*\\\$\s*", stripped)
    if dollars:
        return dollars[1] + stripped[dollars.end() :], "$"
    for match in _AFTER.finditer(stripped):
        body = stripped[: match.start()].rstrip()
        if (
            match.end() == len(stripped)
            and body
            and body[-1] in "0123456789})i"
            and (unit := _name(match))
        ):
            angle = unit.startswith("deg") and _ANGLE.search(
                body
            )  # the degrees of sin 60° are not those of its value
            return (text, None) if angle else (body, unit)
    return text, None


def _slash(match: re.Match[str]) -> str:
    """m s^{-2} is m/s^2."""
    power = "" if match[3] == "1" else f"^{match[3]}"
    return rf"\text{{{match[1]}/{match[2]}{power}}}"


def conflict(one: str | None, other: str | None) -> bool:
    """Two different units of measurement."""
    known = [unit for unit in (one, other) if unit is not None and unit.split("^")[0] in _SPELLINGS]
    return len(known) == 2 and known[0] != known[1]


def _name(match: re.Match[str]) -> str | None:
    """One name for every spelling; None if the words say more than a unit."""
    if match["percent"]:
        return "%"
    text = (match["words"] or match["bare"] or match["prose"] or "").lower()
    if not text:
        return f"deg{(match['scale'] or '').lower()}"
    text, power = _with_power(text.strip(" .()"), match["power"] or match["bare_power"])
    words = re.sub(r"[^a-z%/° ]", "", text).split()
    if re.search(r"\d", text) or _SAYS_MORE.search(" ".join(words)):
        return None
    while words and words[0] in _POWERS:
        power = _POWERS[words.pop(0)]
    unit = "".join(words)
    known = _KNOWN.get(unit) or _KNOWN.get(unit.removesuffix("s"))
    if known is None and len(unit) < 2:  # a bare letter is a variable, even in \\text{}
        return None
    unit = known or unit
    return f"{unit}^{power}" if power > 1 else unit


def _with_power(text: str, behind: str | None) -> tuple[str, int]:
    r"""The power stands inside the words, as in \text{m/s^2}, or behind them."""
    inside = re.fullmatch(r"(.*[a-z])\s*\^\s*([23])", text)
    return (inside[1], int(inside[2])) if inside else (text, int(behind or 1))
