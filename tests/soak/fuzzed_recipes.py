"""Generates recipes and --set overrides, most of them wrong. The same seed gives the same texts."""

from __future__ import annotations

import dataclasses
import random
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from eepo import recipe
from eepo.config import RunConfig, WarmupConfig

RECIPES = Path(__file__).parents[2] / "recipes"

RUN = dataclasses.asdict(RunConfig())
SECTIONS = (*(RUN | dataclasses.asdict(WarmupConfig())), "nothing", "extends")
KNOBS = tuple(f"{section}.{knob}" for section in RUN if section != "name" for knob in RUN[section])
UNKNOWN_KNOBS = ("sead", "a.b", "θ", '""', '"a b"', "1", "training", "name", "x" * 5000)
TEXTS = (
    *("", "a", "auto", "off", "token", "dataset", "countdown", "{numbers} {target}", "{problem}"),
    *("{", "{numbers!r} {target}", "{numbers:{target}}", "x" * 300, "x" * 20_000, "../..", "/"),
    *("θ′ ← θ", "\u202e", "🦜", "\x1b[31m", "\x00", "a\nb", "%s %d {0}", "~nobody/x", "-1"),
)
NUMBERS = (
    *("0", "-0", "1", "-1", "1_000", "0.1", "1e400", "-1e400", "inf", "-inf", "nan", "5e-324"),
    *(str(2**63), str(2**64), "9" * 400, "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000),
    *("0b" + "1" * 20_000, "1e" + "9" * 5000, "0." + "1" * 5000, "01", "1__0", "0xG", "1.e5"),
)
OTHER_VALUES = (
    *("true", "false", "[]", "{}", "[1, 'a']", "[[1], [2]]", "{a = 1}", "1979-05-27", "07:32:00"),
    *("1979-05-27T07:32:00Z", "0000-00-00", "9999-12-31T23:59:60+24:00", "", "word", "'"),
)


def fuzzed_recipes(seed: int, number: int) -> Iterator[str]:
    """Yield TOML texts. About a tenth of them are valid."""
    rng = random.Random(f"recipes/{seed}")
    shipped = _shipped()
    makers: list[Callable[[random.Random], str]] = [
        _sections,
        _sections,
        _deep_nesting,
        _extends,
        _unicode,
        lambda rng: _mutated(rng.choice(shipped), rng),
        lambda rng: _mutated(rng.choice(shipped), rng),
        lambda rng: rng.choice(shipped) + "\n" + _assignment(rng),
        lambda rng: _other_value(rng.choice(shipped), rng),
    ]
    for _ in range(number):
        yield rng.choice(makers)(rng)


def fuzzed_overrides(seed: int, number: int) -> Iterator[str]:
    """Yield values of --set. Bytes that are not UTF-8 are lone surrogates, as in `sys.argv`."""
    rng = random.Random(f"overrides/{seed}")
    for _ in range(number):
        key = rng.choice(
            (
                rng.choice(KNOBS),
                rng.choice(KNOBS),
                rng.choice(KNOBS),
                f"{rng.choice(SECTIONS)}.{rng.choice(UNKNOWN_KNOBS)}",
                ".".join(rng.choices(SECTIONS, k=rng.choice((2, 3, 500)))),
                rng.choice(("", ".", "a..b", " ", "\udcff", "training.\udc80")),
            )
        )
        value = rng.choice((_value(rng), _value(rng), _unquoted(rng), _nested(rng)))
        shape = rng.choice(("{0}={1}", "{0}={1}", "{0}={1}", " {0} = {1}", "{0}", "{1}"))
        yield shape.format(key, value)


@cache
def _shipped() -> list[str]:
    """Return the texts of the shipped recipes, and each training recipe with all its knobs."""
    texts = []
    for path in sorted(RECIPES.rglob("*.toml")):
        text = path.read_text(encoding="utf-8")
        texts.append("".join(line for line in text.splitlines(True) if "extends" not in line))
        if "supervised" not in tomllib.loads(text):
            texts.append(recipe.dump(recipe.load_run(path)))
    return texts


def _value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return _quoted(rng.choice(TEXTS), rng)
    return rng.choice(NUMBERS if kind < 0.75 else OTHER_VALUES)


def _quoted(text: str, rng: random.Random) -> str:
    """Write a text as TOML, sometimes with characters that TOML does not allow."""
    if rng.random() < 0.2:
        return f"'{text}'"
    if rng.random() < 0.1:
        return f'"""{text}"""'
    escaped = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return '"' + escaped.replace('"', '\\"') + '"'


def _unquoted(rng: random.Random) -> str:
    return rng.choice((*TEXTS, "\udcff", "\ud800x", "1\nother = 2", "1 # comment", "[1"))


def _assignment(rng: random.Random, section: str = "") -> str:
    known = [knob.removeprefix(f"{section}.") for knob in KNOBS if knob.startswith(f"{section}.")]
    knob = rng.choice(known if known and rng.random() < 0.9 else UNKNOWN_KNOBS)
    return f"{knob} = {_value(rng)}"


def _sections(rng: random.Random) -> str:
    """Valid sections with wrong values, wrong types and unknown keys."""
    lines = [_assignment(rng)] if rng.random() < 0.3 else []
    for section in rng.sample(SECTIONS, rng.randint(1, 4)):
        header = rng.choice((f"[{section}]", f"[{section}]", f"[[{section}]]", f"[a.{section}]"))
        lines.append(header)
        lines += [_assignment(rng, section) for _ in range(rng.randint(0, 4))]
    return "\n".join(lines) + "\n"


def _nested(rng: random.Random) -> str:
    levels = rng.choice((1, 15, 25, 200, 900, 2000))
    opening, closing = rng.choice((("[", "]"), ("{a = ", "}"), ("[{a = [", "]}]")))
    return opening * levels + rng.choice(("1", "")) + closing * (levels - rng.choice((0, 0, 1)))


def _deep_nesting(rng: random.Random) -> str:
    key = ".".join(["a"] * rng.choice((2, 30, 800, 1500)))
    return rng.choice(
        (
            f"[training]\nseed = {_nested(rng)}\n",
            f"nothing = {_nested(rng)}\n",
            f"{key} = 1\n",
            f"[{key}]\nb = 1\n",
            f"[training]\n{key} = 1\n",
        )
    )


def _extends(rng: random.Random) -> str:
    name = rng.choice(
        (*TEXTS, "recipe.toml", "missing.toml", "/dev/null", "/proc/self/mem", "/tmp")
    )
    return f"extends = {_quoted(name, rng)}\n" + _sections(rng)


def _unicode(rng: random.Random) -> str:
    characters = [chr(rng.choice((rng.randrange(0x20), rng.randrange(0xD800), 0x1F99C)))]
    characters += rng.choices("[]{}=\"'#\n.,\\u θ\ufeff\u2028\x00", k=rng.randint(1, 60))
    rng.shuffle(characters)
    return "".join(characters)


def _mutated(text: str, rng: random.Random) -> str:
    """Change some bytes. What is then not UTF-8 is replaced: `str` cannot hold it."""
    data = bytearray(text.encode("utf-8"))
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        start = rng.randrange(len(data) + 1)
        change = rng.randrange(4)
        if change == 0 and data:
            data[start % len(data)] = rng.randrange(256)
        elif change == 1:
            del data[start : start + rng.choice((1, 5, 100))]
        elif change == 2:
            data[start:start] = bytes(rng.choices(b"[]{}=\"'.\n\\#,-0", k=rng.randint(1, 8)))
        else:
            data[start:start] = data[start : start + rng.choice((1, 30, 400))]
    return data.decode("utf-8", errors=rng.choice(("replace", "ignore")))


def _other_value(text: str, rng: random.Random) -> str:
    """Replace the value of one line."""
    lines = text.splitlines()
    assignments = [index for index, line in enumerate(lines) if " = " in line]
    if assignments:
        index = rng.choice(assignments)
        lines[index] = f"{lines[index].partition(' = ')[0]} = {_value(rng)}"
    return "\n".join(lines) + "\n"
