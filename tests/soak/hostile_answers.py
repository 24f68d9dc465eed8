r"""Generates wrong answers that a lenient maths grader accepts, or that cost a slow one its time.

Each comes with the gold answer that it imitates. A grader must reject each of them within 2 s. The
same seed always gives the same answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction

LONG = 100_000  # characters

Pair = tuple[str, str]  # gold answer, wrong answer
# Cyrillic and Greek letters that look like Latin ones.
LOOK_ALIKES = {"a": "а", "c": "с", "e": "е", "x": "х", "y": "у", "p": "р", "v": "ν"}


def hostile_answers(seed: int, number: int) -> Iterator[Pair]:
    """Yield pairs of a gold answer and the text of a completion with a wrong answer."""
    rng = random.Random(seed)
    for _ in range(number):
        family = rng.choice(FAMILIES)
        if family in WHOLE_TEXTS:
            yield family(rng)
        else:
            gold, answer = family(rng)
            yield gold, _completion(rng, answer)


def _completion(rng: random.Random, answer: str) -> str:
    templates = (
        r"\boxed{%s}", r"So we get $\boxed{%s}$.", r"Step 1. Step 2. \[\boxed{ %s }\]",
        r"\boxed{x} is not it. Final answer: \boxed{%s}", "<think>hm</think> \\fbox{%s}",
    )  # fmt: skip
    return rng.choice(templates).replace("%s", answer)


def _whole(rng: random.Random) -> int:
    return rng.choice((rng.randint(2, 99), rng.randint(100, 10**6)))


def _two_wholes(rng: random.Random) -> tuple[int, int]:
    first = _whole(rng)
    return first, first + rng.choice((-1, 1, 10, 100))


def _value(rng: random.Random) -> str:
    """Return a gold answer with an exact value that is neither 0 nor 1."""
    n = rng.randint(2, 99)
    return rng.choice((f"{n}", rf"\frac{{{n}}}{{101}}", rf"\sqrt{{{n * n + 1}}}", rf"{n}\pi"))


def _formula(rng: random.Random) -> str:
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    return rng.choice(("x", f"{a}x+{b}", f"x^2-{b}", rf"\frac{{x}}{{{a}}}", rf"\sin({a}x)"))


def _rounded(rng: random.Random) -> Pair:
    value = rng.randint(1, 1000) + Fraction(rng.randint(1, 6), 7)
    rounded = round(value, rng.randint(0, 2))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}", f"{float(rounded)}"


def _almost_whole(rng: random.Random) -> Pair:
    gold = _whole(rng)
    zeros = "0" * rng.randint(1, 200)
    return str(gold), rng.choice((f"{gold}.{zeros}1", f"{gold - 1}.{'9' * len(zeros)}"))


def _other_sign(rng: random.Random) -> Pair:
    gold = _value(rng)
    answer = rng.choice(("-%s", "-(%s)", "0-%s", r"-1\cdot %s", r"\pm %s")).replace("%s", gold)
    return (gold, answer) if rng.random() < 0.5 or r"\pm" in answer else (answer, gold)


def _other_unit(rng: random.Random) -> Pair:
    units = rng.choice(
        (("cm", "m", "mm", "km"), ("minutes", "hours", "seconds"), ("kg", "grams", "pounds"),
         ("cm^2", "cm^3", "cm"), ("dollars", "euros", "cents", "yen"), ("degrees", "radians"))
    )  # fmt: skip
    left, right = rng.sample(units, 2)
    n = _whole(rng)
    return rf"{n}\text{{ {left}}}", rf"{n}\text{{ {right}}}"


def _other_currency(rng: random.Random) -> Pair:
    signs = rng.sample((r"\$", "€", "£", "¥", "₹"), 2)
    n = _whole(rng)
    return f"{signs[0]}{n}", f"{signs[1]}{n}"


def _other_base(rng: random.Random) -> Pair:
    base = rng.randint(3, 9)
    digits = str(rng.randint(1, base - 1)) + "".join(str(rng.randrange(base)) for _ in range(4))
    other = rng.choice([number for number in range(base, 17) if number != base])
    return f"{digits}_{base}", rng.choice((f"{digits}_{{{other}}}", f"{int(digits, base)}_{{10}}"))


def _nested(rng: random.Random) -> Pair:
    gold, other = _two_wholes(rng)
    depth = rng.choice((5, 19, 21, 100, 400, 900))
    brackets = rng.choice((("(", ")"), ("{", "}"), ("[", "]"), (r"\{", r"\}"), ("|", "|")))
    nested = rng.choice(
        (
            brackets[0] * depth + str(other) + brackets[1] * depth,
            brackets[0] * depth + str(gold),
            r"\sqrt{" * (depth // 6 + 1) + str(gold) + "}" * (depth // 6 + 1),
            r"\frac{1}{" * (depth // 8 | 1) + str(other) + "}" * (depth // 8 | 1),
            r"\sin(" * (depth // 6 + 1) + str(gold) + ")" * (depth // 6 + 1),
            "2^{" * (depth // 3 + 1) + str(gold) + "}" * (depth // 3 + 1),
        )
    )
    # An opening brace that is never closed would end the box: such texts have no answer.
    return str(gold), nested


def _giant_power(rng: random.Random) -> Pair:
    gold = _whole(rng)
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    tower = rng.choice(
        (f"{a}^{{{b}^{{{c}^9}}}}", f"{a}^{{{10 ** rng.randint(3, 18)}}}", f"{a}**{b}**{c}**9",
         rf"({a}+10^{{-100}})^{{10^{{100}}}}", f"1e{10 ** rng.randint(3, 9)}")
    )  # fmt: skip
    answer = rng.choice(("%s", f"{gold}+%s", f"{gold}+1/%s", rf"{gold}\cdot(1+\frac{{1}}{{%s}})"))
    return str(gold), answer.replace("%s", tower)


def _factorials(rng: random.Random) -> Pair:
    gold, n = _whole(rng), rng.choice((30, 100, 1000, 10**4, 10**6, 10**9))
    return rng.choice(
        ((str(gold), rf"{gold}+\frac{{1}}{{{n}!}}"), ("0", rf"\frac{{1}}{{{n}!}}"),
         (str(gold), f"(({gold % 9 + 3}!)!)!"), (str(gold), f"{n}!-{n}!!+{gold}"),
         ("e", rf"\sum_{{k=0}}^{{{n % 997 + 20}}} \frac{{1}}{{k!}}"))
    )  # fmt: skip


def _tiny_difference(rng: random.Random) -> Pair:
    gold, k = _value(rng), rng.randint(20, 3000)
    tiny = rng.choice(
        (f"e^{{-{k}}}", f"10^{{-{k}}}", rf"\frac{{1}}{{{k}!}}", rf"(1-\tanh {k})",
         rf"\sin(10^{{-{k}}})", rf"(\frac{{\pi}}{{2}}-\arctan(e^{{{k}}}))")
    )  # fmt: skip
    return rng.choice(((gold, f"{gold}+{tiny}"), ("0", tiny), (gold, rf"{gold}\cdot (1-{tiny})")))


def _tiny_term(rng: random.Random) -> Pair:
    gold, k = _formula(rng), rng.randint(10, 500)
    term = rng.choice((f"10^{{-{k}}}", f"10^{{-{k}}}x", f"e^{{-{10 * k}}}", f"e^{{-{k}(1+x^2)}}"))
    return gold, f"{gold}+{term}"


def _step_function(rng: random.Random) -> Pair:
    a = rng.randint(2, 9)
    x = rng.choice(("x", "(x+1)", "2x", "x^2"))
    return rng.choice(
        ((rf"\lfloor {a}t \rfloor", rf"{a}\lfloor t \rfloor"), (rf"\lfloor {x} \rfloor", x),
         (rf"\lfloor {x} \rfloor", rf"\lceil {x} \rceil"), (rf"{x}-\lfloor {x} \rfloor", "0"),
         (rf"{a}t", rf"{a}\lfloor t \rfloor"), ("t^2", r"\lfloor t \rfloor^2"),
         (rf"\lceil {x} \rceil", rf"\lfloor {x} \rfloor+1"),
         (r"\lfloor t \rfloor", r"-\lfloor -t \rfloor"), (f"{a}", rf"{a}+\lfloor x/10^{a} \rfloor"),
         ("-1", rf"\lfloor {x} \rfloor+\lfloor -{x} \rfloor"))
    )  # fmt: skip


def _vanishing_term(rng: random.Random) -> Pair:
    gold = _formula(rng)
    roots = rng.sample(range(-20, 41), rng.randint(2, 12))
    denominator = rng.choice((1, 1, 997))
    factors = "".join(rf"(x-\frac{{{root}}}{{{denominator}}})" for root in roots)
    term = rng.choice(
        (factors, rf"\sin({rng.choice((1, 997, 10**6))}\pi x)", rf"10^{{-9}}{factors}")
    )
    return gold, f"{gold}+{term}"


def _equal_for_small_numbers(rng: random.Random) -> Pair:
    a = rng.choice((50, 1000, 10**6))
    return rng.choice(
        ((f"{a}-x", f"|x-{a}|"), (f"{a}-x", rf"\sqrt{{(x-{a})^2}}"), (str(a), rf"\max(x,{a})"),
         ("x", rf"\min(x,{a})"), ("x", r"\arctan(\tan x)"), ("|x|", "x"))
    )  # fmt: skip


def _look_alike(rng: random.Random) -> Pair:
    gold = rng.choice(("x+1", "2x-y", "ax^2+c", r"\frac{p}{v}", "e^x", "a", "x"))
    letter = rng.choice([letter for letter in LOOK_ALIKES if letter in gold.replace("frac", "")])
    head, command, tail = gold.rpartition("frac")
    return gold, head + command + tail.replace(letter, LOOK_ALIKES[letter])


def _other_letter(rng: random.Random) -> Pair:
    return rng.choice(
        (("R-r", "0"), (r"\pi R^2", r"\pi r^2"), ("mghR", "mghr"), ("nRT", "nrt"), ("A+a", "2A"),
         ("y'-y", "0"), ("east", "seat"), (r"\text{north}", "thorn"), ("x_1", "x_2"),
         ("abc", "abd"), (r"\text{Tuesday}", "Thursday"), ("ABCD", "ABDC"),
         ("Anna beats Bob", "Bob beats Anna"))
    )  # fmt: skip


def _comment(rng: random.Random) -> Pair:
    """Put the gold answer where a reader ignores it."""
    gold, other = _two_wholes(rng)
    template = rng.choice(
        (r"\boxed{%o %% %g}", r"\boxed{%o} %% %g", r"\boxed{%o \text{ not } %g}",
         r"\boxed{%o} # %g", r"%% \boxed{%g}" "\n" r"\boxed{%o}", r"\boxed{%o /* %g */}",
         r"\boxed{\iffalse %g \fi %o}", r"\boxed{%o}<!-- answer: %g -->",
         r"The answer is %g. \boxed{%o}", r"#### %g \boxed{%o}",
         r"\boxed{%o \quad (\text{or } %g)}", r"<answer>%g</answer> \boxed{%o}",
         r"\boxed{%o<!--%g-->}")
    )  # fmt: skip
    text = template.replace("%%", "%").replace("%g", str(gold)).replace("%o", str(other))
    return str(gold), text


def _several_answers(rng: random.Random) -> Pair:
    gold, other = _two_wholes(rng)
    text = rng.choice(
        (r"\boxed{%g} \boxed{%o}", r"\boxed{%g, %o}", r"\boxed{%g \text{ or } %o}",
         r"\boxed{%g;%o}", r"\boxed{\boxed{%g} \boxed{%o}}", r"\boxed{%g\ %o}", r"\boxed{%g = %o}",
         r"\boxed{\{%g, %o\}}", r"\boxed{%o = %g}", r"\boxed{%g \approx %o}", r"\boxed{%g \to %o}",
         r"\boxed{%g \text{ to } %o}", r"\boxed{%g \pm 1}", r"\boxed{[%g, %o]}", r"\boxed{%g!}",
         r"\boxed{x = %g \text{ or } x = %o}",
         r"\boxed{%g \text{ for all } x, %o \text{ otherwise}}", r"\boxed{\ne %g}", r"\boxed{< %g}")
    )  # fmt: skip
    return str(gold), text.replace("%g", str(gold)).replace("%o", str(other))


def _long_text(rng: random.Random) -> Pair:
    gold, other = _two_wholes(rng)
    piece = rng.choice(
        (f"{gold} ", f"{gold}, ", f"{gold}+", "{", "(", r"\boxed{", r"\frac{1}{", "\\")
    )
    filler = (piece * LONG)[:LONG]
    box = rf" \boxed{{{other}}}"
    return str(gold), rng.choice(
        (filler, filler[: -len(box)] + box, rf"\boxed{{{filler}}}", rf"\boxed{{{filler[:1900]}}}")
    )


def _other_elements(rng: random.Random) -> Pair:
    a, b, c = rng.sample(range(2, 60), 3)
    return rng.choice(
        ((f"{a}, {b}", f"{a}"), (f"{a}, {b}", f"{a}, {b}, {c}"), (f"{a}, {b}", f"{a}, {a}"),
         (f"({a}, {b})", f"({b}, {a})"), (f"[{a}, {a + b})", f"({a}, {a + b}]"),
         (f"[{a}, {a + b}]", rf"{a} \le x < {a + b}"), (f"[{a}, {a + b}]", f"[{a}, {a + b}.0001]"),
         (rf"\{{{a}, {b}\}}", rf"\{{{a}, {c}\}}"), (f"({a}, {b})", f"({a}, {b}+10^{{-30}})"),
         (rf"(-\infty,{a})\cup({a + 1},\infty)", rf"(-\infty,{a})\cup({a},\infty)"))
    )  # fmt: skip


def _other_relation(rng: random.Random) -> Pair:
    a, b, k = rng.randint(2, 9), rng.randint(1, 9), rng.randint(15, 1500)
    return rng.choice(
        ((f"y={a}x+{b}", f"y={a}x+{b}+10^{{-{k}}}"), (f"y={a}x", f"y=({a}+e^{{-{k}}})x"),
         (f"x>{a}", f"x>={a}"), (f"x>{a}", f"x<{a}"), (f"x>{a}", f"x>{a}+10^{{-{k}}}"),
         (f"x<{a}", rf"x<{a}\tanh {k}"), (f"{a}x+{b}=0", f"{a}x+{b}"), (f"x={a}", f"y={a}"))
    )  # fmt: skip


def _other_time(rng: random.Random) -> Pair:
    hours, minutes = rng.randint(1, 12), rng.randint(10, 29)
    a, b = rng.sample(range(2, 10), 2)
    return rng.choice(
        ((f"{hours}:{minutes}", f"{2 * hours}:{2 * minutes}"), (f"{a}:{b}", f"{b}:{a}"),
         (f"{hours}:{minutes}", f"{hours}.{minutes}"), (f"{a}:{b}", f"{a}:{b}:1"),
         (rf"{hours}:{minutes}\text{{ a.m.}}", rf"{hours}:{minutes}\text{{ p.m.}}"))
    )  # fmt: skip


WHOLE_TEXTS = (_comment, _several_answers, _long_text)
FAMILIES: tuple[Callable[[random.Random], Pair], ...] = (
    _rounded, _almost_whole, _other_sign, _other_unit, _other_currency, _other_base, _nested,
    _giant_power, _factorials, _tiny_difference, _tiny_term, _step_function, _vanishing_term,
    _equal_for_small_numbers, _look_alike, _other_letter, _other_elements, _other_relation,
    _other_time, *WHOLE_TEXTS,
)  # fmt: skip
