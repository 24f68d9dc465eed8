"""Grades countdown: reward 1 if the expression uses each number once and hits the target, else 0.

The expression is parsed into exact fractions. Python never evaluates it. Its length, its nesting
and the size of its numbers are bounded, so every completion is graded within microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from eepo.types import Prompt, Verdict

MAX_CHARACTERS = 200
MAX_DEPTH = 20
_TOKEN = re.compile(r"[ \t\r\n]*([0-9]{1,4}(?![0-9])|[-+*/()])", re.ASCII)


class CountdownReward:
    """Grades in the trainer's process."""

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        pairs = zip(prompts, texts, strict=True)
        return [_verdict(prompt.answer, text) for prompt, text in pairs]


def _verdict(problem: Mapping[str, Any], text: str) -> Verdict:
    expression = parse_expression(answer_text(text))
    if expression is None:
        return Verdict(0.0, None, "no expression found")
    if sorted(expression.numbers) != sorted(problem["numbers"]):
        return Verdict(0.0, expression.canonical, "other numbers")
    if expression.value != problem["target"]:
        return Verdict(0.0, expression.canonical, "misses the target")
    return Verdict(1.0, expression.canonical, "hits the target")


@dataclass(frozen=True)
class Expression:
    """A parsed expression. `canonical` ignores the order of operands: 2+3*4 equals 4*3+2."""

    value: Fraction
    numbers: tuple[int, ...]
    canonical: str


def answer_text(text: str) -> str:
    """Return the contents of the last <answer> tag, or the whole text if there is no tag."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, answer = before.rpartition("<answer>")
    return answer if opening and closing else text


def parse_expression(text: str) -> Expression | None:
    """Parse `text`; return None if it is not exactly one expression, or divides by zero."""
    text = text.strip(" \t\r\n")
    if not text or len(text) > MAX_CHARACTERS:
        return None
    tokens = _tokens(text)
    if tokens is None:
        return None
    try:
        parser = _Parser(tokens)
        terms = parser.sum(depth=0)
        if parser.index != len(tokens):
            return None
        return Expression(_value_of_sum(terms), tuple(parser.numbers), _canonical_sum(terms))
    except (_NotAnExpression, ZeroDivisionError):
        return None


class _NotAnExpression(Exception):
    pass


# A sum is a list of (sign, product). A product is a list of (power, atom), where power is 1 or -1.
# An atom is a number, or a sum in brackets.
_Sum = list[tuple[int, list[tuple[int, "int | _Sum"]]]]


class _Parser:
    """Parses tokens by recursive descent and collects the numbers on the way."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.index = 0
        self.numbers: list[int] = []

    def sum(self, depth: int) -> _Sum:
        terms: _Sum = [(1, self.product(depth))]
        while (sign := self.peek()) in ("+", "-"):
            self.index += 1
            terms.append((1 if sign == "+" else -1, self.product(depth)))
        return terms

    def product(self, depth: int) -> list[tuple[int, int | _Sum]]:
        factors: list[tuple[int, int | _Sum]] = [(1, self.atom(depth))]
        while (sign := self.peek()) in ("*", "/"):
            self.index += 1
            factors.append((1 if sign == "*" else -1, self.atom(depth)))
        return factors

    def atom(self, depth: int) -> int | _Sum:
        token = self.peek()
        self.index += 1
        if token is not None and token.isdigit():
            self.numbers.append(int(token))
            return int(token)
        if token != "(" or depth >= MAX_DEPTH:
            raise _NotAnExpression
        inner = self.sum(depth + 1)
        if self.peek() != ")":
            raise _NotAnExpression
        self.index += 1
        return inner

    def peek(self) -> str | None:
        return self.tokens[self.index] if self.index < len(self.tokens) else None


def _tokens(text: str) -> list[str] | None:
    tokens, index = [], 0
    while index < len(text):
        match = _TOKEN.match(text, index)
        if match is None:
            return None
        tokens.append(match.group(1))
        index = match.end()
    return tokens


def _value_of_sum(terms: _Sum) -> Fraction:
    total = Fraction(0)
    for sign, factors in terms:
        product = Fraction(sign)
        for power, atom in factors:
            product *= (Fraction(atom) if isinstance(atom, int) else _value_of_sum(atom)) ** power
        total += product
    return total


def _canonical_sum(terms: _Sum) -> str:
    signed = [("+" if sign > 0 else "-") + text for sign, text in _flat_terms(terms, 1)]
    return "".join(sorted(signed))


def _flat_terms(terms: _Sum, outer: int) -> list[tuple[int, str]]:
    """Return (sign, text) of each term. Remove brackets around sums: 9-(4-1) becomes 9-4+1.

    `outer` is the sign in front of the brackets.
    """
    flat: list[tuple[int, str]] = []
    for sign, factors in terms:
        if len(factors) == 1 and not isinstance(factors[0][1], int):
            flat += _flat_terms(factors[0][1], outer * sign)
        else:
            signed = [
                ("*" if power > 0 else "/") + text for power, text in _flat_factors(factors, 1)
            ]
            flat.append((outer * sign, "".join(sorted(signed))))
    return flat


def _flat_factors(factors: list[tuple[int, int | _Sum]], outer: int) -> list[tuple[int, str]]:
    """Return (power, text) of each factor. Remove brackets around products: 8/(4/2) is 8/4*2.

    `outer` is the power of the brackets: 1 after `*`, -1 after `/`.
    """
    flat: list[tuple[int, str]] = []
    for power, atom in factors:
        if isinstance(atom, int):
            flat.append((outer * power, str(atom)))
        elif len(atom) == 1:  # a single term is a product, and its sign is always +
            flat += _flat_factors(atom[0][1], outer * power)
        else:
            flat.append((outer * power, f"({_canonical_sum(atom)})"))
    return flat
