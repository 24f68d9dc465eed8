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
}
_KNOWN = {word: unit for unit, words in _SPELLINGS.items() for word in [unit, *words.split()]}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_BARE_WORDS = "|".join(sorted((word for word in _KNOWN if len(word) > 1 and word.isalpha()), key=len, reverse=True))
_AFTER = re.compile(
    r"(?P<text>\\text\{(?P<words>[^{}]{1,60})\})\s*(?:\^\s*\{?(?P<power>[23])\}?)?"
    r"|(?P<circle>\^\\circ(?:\s*[CF]\b)?)"
    r"|(?P<percent>%)"
    rf"|(?<![A-Za-z\\])(?P<bare>(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{_BARE_WORDS})s?)(?:\s*\^\s*\{{?(?P<bare_power>[23])\}}?)?",
    re.IGNORECASE,
)


def split_unit(text: str) -> tuple[str, str | None]:
    r"""The number and its unit: ("15", "cm^2"), ("50", "%"), or the text as it is and None."""
    stripped = text.strip()
    dollars = re.match(r"([-+]?)\s*\\\$\s*", stripped)
    if dollars:
        return dollars[1] + stripped[dollars.end() :], "$"
    for match in _AFTER.finditer(stripped):
        body = stripped[: match.start()].rstrip()
        if match.end() == len(stripped) and body and body[-1] in "0123456789})i":
            return body, _name(match)
    return text, None


def conflict(one: str | None, other: str | None) -> bool:
    """Two different units of measurement. Percent conflicts with nothing: see the policy."""
    known = [unit for unit in (one, other) if unit is not None and unit.split("^")[0] in _SPELLINGS]
    return len(known) == 2 and known[0] != known[1]


def _name(match: re.Match[str]) -> str:
    if match["circle"]:
        return "deg"
    if match["percent"]:
        return "%"
    words = re.sub(r"[^a-z%/° ]", "", (match["words"] or match["bare"]).lower()).split()
    power = int(match["power"] or match["bare_power"] or 1)
    while words and words[0] in _POWERS:
        power = _POWERS[words.pop(0)]
    unit = "".join(words)
    unit = _KNOWN.get(unit) or _KNOWN.get(unit.removesuffix("s")) or unit or "unit"
    return f"{unit}^{power}" if power > 1 else unit
