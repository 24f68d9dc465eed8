r"""Splits units of measurement from numbers, and decides which units contradict each other.

The rules:
- A unit is text after a number (`\text{ cm}^2`, `^\circ`, a known word such as `cm` or `degrees`),
  or a currency before it (`\$`, €, £, ¥). A single letter is a variable, unless `\text` marks a
  known unit (`\text{m}`). Letters such as `xyz` are a product of variables.
- A unit on one side only is ignored, because the problem states the unit of the answer.
- Known units on both sides must be the same, powers included. Nothing is converted: 100 cm is not
  1 m. Words that are not a known unit (`7 \text{ ways}`) are ignored.
- 50 % equals 50, because the problem may ask for a percentage. It also equals 0.5.
"""

from __future__ import annotations

import re

from eepo.rewards.words import is_product

# canonical unit: its other spellings, in the singular
_UNITS = {
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
    "lb": "lbs",
    "pound": "pound",  # of weight, or the currency
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
    "$": "dollar usd buck usdollar",
    "¢": "cent",
    "€": "euro eur",
    "£": "gbp sterling poundsterling britishpound",
    "¥": "yen jpy yuan cny rmb",
    "₹": "rupee inr rs",
    "₽": "ruble rouble rub",
    "₩": "won krw",
    "franc": "chf swissfranc",
    "peso": "peso mxn",
    "krona": "krone kronor sek",
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
_CANONICAL = {word: unit for unit, words in _UNITS.items() for word in [unit, *words.split()]}
_AMBIGUOUS = {"pound": ("lb", "£")}
_CURRENCY_COMMANDS = {r"\$": "$", r"\euro": "€", r"\pounds": "£", r"\yen": "¥"}
_CURRENCY = r"\\\$|\\(?:euro|pounds|yen)(?![A-Za-z])|[€£¥₹₽₩]"
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_BARE_WORDS = "|".join(
    sorted((word for word in _CANONICAL if len(word) > 1 and word.isalpha()), key=len, reverse=True)
)
# A text with one of these words changes the answer, so it is not dropped as a unit.
_MEANINGFUL_WORDS = re.compile(
    r"\b(?:or|and|not|no|times|plus|minus|over|is|are|was|if|than"
    r"|hundred|thousand|million|billion|dozen|half|to)\b"
)
_NEGATIVE_POWER = re.compile(
    r"\\text\{([^{}^]*[A-Za-z])[ .]+([A-Za-z]+)\s*\^\s*\{\s*-\s*([123])\s*\}\s*\}"
)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_UNIT_AFTER_NUMBER = re.compile(
    r"\\text\{(?P<words>[^{}]{1,60})\}\s*(?:\^\s*\{?(?P<power>[23])\}?)?"
    r"|\^\\circ\s*(?:\\text\{\s*)?(?P<scale>[CF]?)\s*\}?"
    r"|(?P<percent>%)"
    rf"|(?P<currency>{_CURRENCY})"
    rf"|\s+(?P<bare>(?:(?:square|sq|cubic|cu)\.?\s+)?(?:{_BARE_WORDS})s?)"
    r"(?:\s*\^\s*\{?(?P<bare_power>[23])\}?)?"
    r"|\s+(?P<prose>[A-Za-z]{3,20}(?: [A-Za-z]{1,20}){0,4})",
    re.IGNORECASE,
)

_CURRENCY_BEFORE_NUMBER = re.compile(rf"([-+]?)\s*({_CURRENCY})\s*")


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Return (number, unit), such as ("15", "cm^2") or ("50", "%"); (text, None) if no unit."""
    stripped = _NEGATIVE_POWER.sub(_with_slash, text.strip())
    currency = _CURRENCY_BEFORE_NUMBER.match(stripped)
    if currency:
        sign = _CURRENCY_COMMANDS.get(currency[2], currency[2])
        return currency[1] + stripped[currency.end() :], sign
    for match in _UNIT_AFTER_NUMBER.finditer(stripped):
        number = stripped[: match.start()].rstrip()
        follows_number = number and number[-1] in "0123456789})i"
        if match.end() == len(stripped) and follows_number and (unit := _canonical_unit(match)):
            # The degrees in sin 60° belong to the angle, not to the value of the sine.
            if unit.startswith("deg") and _TRIGONOMETRY.search(number):
                return text, None
            return number, unit
    return text, None


def units_conflict(unit: str | None, other: str | None) -> bool:
    """Return whether both are known units and they differ. A pound may be two different units."""
    known = [name for name in (unit, other) if name is not None and name.split("^")[0] in _UNITS]
    if len(known) < 2 or known[0] == known[1]:
        return False
    return known[1] not in _AMBIGUOUS.get(known[0], ()) and known[0] not in _AMBIGUOUS.get(
        known[1], ()
    )


def _with_slash(match: re.Match[str]) -> str:
    """Rewrite m s^{-2} as m/s^2."""
    power = "" if match[3] == "1" else f"^{match[3]}"
    return rf"\text{{{match[1]}/{match[2]}{power}}}"


def _canonical_unit(match: re.Match[str]) -> str | None:
    """Return one name for every spelling of a unit; None if the words are more than a unit."""
    if match["percent"]:
        return "%"
    if match["currency"]:
        return _CURRENCY_COMMANDS.get(match["currency"], match["currency"])
    if match["prose"] and is_product(match["prose"]) and not _is_abbreviation(match["prose"]):
        return None
    text = (match["words"] or match["bare"] or match["prose"] or "").lower()
    if not text:
        return f"deg{(match['scale'] or '').lower()}"
    text, power = _split_power(text.strip(" .()"), match["power"] or match["bare_power"])
    words = re.sub(r"[^a-z%/° ]", "", text).split()
    if re.search(r"\d", text) or _MEANINGFUL_WORDS.search(" ".join(words)):
        return None
    while words and words[0] in _POWER_WORDS:
        power = _POWER_WORDS[words.pop(0)]
    unit = "".join(words)
    known = _CANONICAL.get(unit) or _CANONICAL.get(unit.removesuffix("s"))
    if known is None and len(unit) < 2:  # an unknown single letter is a variable, even in \text{}
        return None
    unit = known or unit
    return f"{unit}^{power}" if power > 1 else unit


def _is_abbreviation(word: str) -> bool:
    """Return whether letters without a vowel are short for a unit, such as `pts`, and not `xyz`."""
    return len(word) == 3 and word.islower() and word not in ("abc", "xyz", "pqr", "rst", "uvw")


def _split_power(text: str, power_after: str | None) -> tuple[str, int]:
    r"""Split off the power, which is inside of the text, as in \text{m/s^2}, or after it."""
    inside = re.fullmatch(r"(.*[a-z])\s*\^\s*([23])", text)
    return (inside[1], int(inside[2])) if inside else (text, int(power_after or 1))
