"""Grades countdown: 1 if the expression uses each number once and hits the target, else 0.

The expression is parsed, never evaluated by Python, in exact fractions. Its length, nesting and the size of its
numbers are bounded, so no completion can cost more than microseconds.
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
    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Verdict]:
        return [
            self._verdict(prompt.answer, text) for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _verdict(self, problem: Mapping[str, Any], text: str) -> Verdict:
        """The answer is the expression with the order of sums and products settled: 2+3*4 and 4*3+2 are one."""
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
    value: Fraction
    numbers: tuple[int, ...]
    canonical: str


def answer_text(text: str) -> str:
    """What stands in the last <answer> tag, or all of it where there is none."""
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    return answer if opened and closed else text


def parse_expression(text: str) -> Expression | None:
    """The expression, or None if `text` is not exactly one (or divides by zero)."""
    text = text.strip(" \t\r\n")
    if not text or len(text) > MAX_CHARACTERS:
        return None
    tokens = _tokens(text)
    if tokens is None:
        return None
    try:
        parser = _Parser(tokens)
        terms = parser.sum(depth=0)
        if parser.place != len(tokens):
            return None
        return Expression(_value_of_sum(terms), tuple(parser.numbers), _canonical_sum(terms))
    except (_NotAnExpression, ZeroDivisionError):
        return None


class _NotAnExpression(Exception):
    pass


# A sum is a list of (sign, product), a product a list of (±1 power, atom), an atom a number or a sum in brackets.
_Sum = list[tuple[int, list[tuple[int, "int | _Sum"]]]]


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.place = 0
        self.numbers: list[int] = []

    def sum(self, depth: int) -> _Sum:
        terms: _Sum = [(1, self.product(depth))]
        while (sign := self.peek()) in ("+", "-"):
            self.place += 1
            terms.append((1 if sign == "+" else -1, self.product(depth)))
        return terms

    def product(self, depth: int) -> list[tuple[int, int | _Sum]]:
        factors: list[tuple[int, int | _Sum]] = [(1, self.atom(depth))]
        while (sign := self.peek()) in ("*", "/"):
            self.place += 1
            factors.append((1 if sign == "*" else -1, self.atom(depth)))
        return factors

    def atom(self, depth: int) -> int | _Sum:
        token = self.peek()
        self.place += 1
        if token is not None and token.isdigit():
            self.numbers.append(int(token))
            return int(token)
        if token != "(" or depth >= MAX_DEPTH:
            raise _NotAnExpression
        inner = self.sum(depth + 1)
        if self.peek() != ")":
            raise _NotAnExpression
        self.place += 1
        return inner

    def peek(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None


def _tokens(text: str) -> list[str] | None:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        tokens.append(match.group(1))
        place = match.end()
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
    return "".join(
        sorted(("+" if sign > 0 else "-") + text for sign, text in _flat_terms(terms, 1))
    )


def _flat_terms(terms: _Sum, outer: int) -> list[tuple[int, str]]:
    """Terms with brackets opened where only signs change: 9-(4-1) is 9-4+1."""
    flat: list[tuple[int, str]] = []
    for sign, factors in terms:
        if len(factors) == 1 and not isinstance(factors[0][1], int):
            flat += _flat_terms(factors[0][1], outer * sign)
        else:
            texts = sorted(
                ("*" if power > 0 else "/") + text for power, text in _flat_factors(factors, 1)
            )
            flat.append((outer * sign, "".join(texts)))
    return flat


def _flat_factors(factors: list[tuple[int, int | _Sum]], outer: int) -> list[tuple[int, str]]:
    """Factors with brackets opened where only powers change: 8/(4/2) is 8/4*2."""
    flat: list[tuple[int, str]] = []
    for power, atom in factors:
        if isinstance(atom, int):
            flat.append((outer * power, str(atom)))
        elif len(atom) == 1:  # a single positive term: only a product stands in the brackets
            flat += _flat_factors(atom[0][1], outer * power)
        else:
            flat.append((outer * power, f"({_canonical_sum(atom)})"))
    return flat
