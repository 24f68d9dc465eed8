"""Lists more than 200 hostile answers. A grader must reject each of them at low cost."""

# ruff: noqa: E501

from __future__ import annotations

MEGABYTE = 2**20


def hostile_answers() -> dict[str, str]:
    """Return completions by name. Most are boxed, so that they reach the parser."""
    answers: dict[str, str] = {}
    for group in (_powers, _factorials, _nesting, _long, _unclosed, _characters, _endless, _code):
        answers |= group()
    return answers


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def _powers() -> dict[str, str]:
    answers = {
        "tower": "9^{9^{9^9}}",
        "tower of ten": "10^{10^{10^{10}}}",
        "negative tower": "9^{-9^{9^9}}",
        "power of power": "((9^9)^9)^{9^9}",
        "python power": "9**9**9**9",
        "e tower": "e^{e^{e^{e^{e}}}}",
        "pi tower": r"\pi^{\pi^{\pi^{\pi^{\pi}}}}",
        "i tower": "i^{i^{i^{i}}}",
        "root of tower": r"\sqrt{9^{9^{9^9}}}",
        "log of tower": r"\log(9^{9^{9^9}})",
        "mod of tower": r"9^{9^{9^9}} \bmod 7",
        "fraction of towers": r"\frac{9^{9^{9^9}}}{9^{9^{9^9}}+1}",
        "difference of towers": "9^{9^{9^9}} - 9^{9^{9^9}} + 41",
        "e-notation": "1e999999999",
        "negative e-notation": "1e-999999999",
        "long exponent": "10^{" + "9" * 300 + "}",
        "float tower": "1.0000001^{9^{9^9}}",
        "symbolic power": "(x+1)^{100000}",
        "expanding power": "(a+b+c+d+e+f+g)^{60} - (a+b+c+d+e+f+g)^{60} + x",
        "root tower": r"\sqrt[9^{9^9}]{2}",
    }
    for exponent in (10**4, 10**5, 10**6, 10**7, 10**8, 10**9, 10**12, 10**18):
        answers[f"2^{exponent}"] = f"2^{{{exponent}}}"
        answers[f"x^{exponent}"] = f"x^{{{exponent}}}+1"
        answers[f"0.5^{exponent}"] = f"0.5^{{{exponent}}}"
        answers[f"(1/3)^{exponent}"] = rf"\left(\frac13\right)^{{{exponent}}}"
    return {f"power: {name}": boxed(answer) for name, answer in answers.items()}


def _factorials() -> dict[str, str]:
    answers = {
        "factorial of factorial": "((((9!)!)!)!)!",
        "factorials in a row": "9!!!!!!!!!!",
        "binomial": r"\binom{10^{9}}{5 \cdot 10^{8}}",
        "huge binomial": r"\binom{10^{100}}{10^{99}}",
        "gamma": r"\Gamma(10^{9})",
        "ratio": r"\frac{1000000!}{999999!}",
        "sum of factorials": r"\sum_{k=1}^{100000} k!",
        "product": r"\prod_{k=1}^{1000000} k",
    }
    for number in (10**3, 10**4, 10**5, 10**6, 10**7, 10**9, 10**15):
        answers[f"{number}!"] = f"{number}!"
        answers[f"1/{number}!"] = rf"\frac{{1}}{{{number}!}}"
    return {f"factorial: {name}": boxed(answer) for name, answer in answers.items()}


def _nesting() -> dict[str, str]:
    answers = {}
    for depth in (50, 200, 900):
        answers |= {
            f"{depth} brackets": "(" * depth + "1" + ")" * depth,
            f"{depth} square brackets": "[" * depth + "1,2" + "]" * depth,
            f"{depth} braces": "{" * depth + "1" + "}" * depth,
            f"{depth} fractions": r"\frac{1}{" * (depth // 8) + "2" + "}" * (depth // 8),
            f"{depth} roots": r"\sqrt{" * (depth // 6) + "2" + "}" * (depth // 6),
            f"{depth} exponents": "2^{" * (depth // 3) + "2" + "}" * (depth // 3),
            f"{depth} subscripts": "x_{" * (depth // 3) + "2" + "}" * (depth // 3),
            f"{depth} sets": r"\{" * (depth // 4) + "1" + r"\}" * (depth // 4),
            f"{depth} minus signs": "-" * depth + "1",
            f"{depth} texts": r"\text{" * (depth // 6) + "a" + "}" * (depth // 6),
            f"{depth} absolute values": "|" * depth + "x" + "|" * depth,
            f"{depth} sines": r"\sin(" * (depth // 6) + "1" + ")" * (depth // 6),
            f"{depth} matrices": (
                r"\begin{pmatrix}" * (depth // 20) + "1" + r"\end{pmatrix}" * (depth // 20)
            ),
            f"{depth} boxes": r"\boxed{" * depth + "1" + "}" * depth,
        }
    return {f"nested: {name}": boxed(answer) for name, answer in answers.items()}


def _long() -> dict[str, str]:
    pieces = {
        "digits": "7", "commas": "1,", "sum": "1+", "product": r"x\cdot ", "letters": "a", "spaces": " ",
        "newlines": "\n", "backslashes": "\\", "fractions": r"\frac12", "equals": "1=", "plus-minus": r"\pm ",
        "unions": r"(0,1)\cup", "columns": "1&", "rows": r"1\\", "text": r"\text{a}", "dollars": "$", "primes": "'",
        "percent": "%", "points": ".", "and": " and ",
    }  # fmt: skip
    answers = {}
    for name, piece in pieces.items():
        megabyte = (piece * MEGABYTE)[:MEGABYTE]
        answers[f"megabyte of {name}"] = megabyte
        answers[f"boxed megabyte of {name}"] = boxed(megabyte)
        answers[f"boxed thousand of {name}"] = boxed((piece * 1800)[:1800])
    answers["half a megabyte of boxes"] = r"\boxed{1}" * (MEGABYTE // 18) + r"\boxed{2}"
    answers["many statements"] = "The answer is 1. " * 50_000 + "The answer is 2."
    return {f"long: {name}": answer for name, answer in answers.items()}


def _unclosed() -> dict[str, str]:
    answers = [
        r"\boxed{", r"\boxed{1", r"\boxed{\frac{1}{2}", r"\boxed{\frac{1}{", r"\boxed{\left(1}", r"\boxed{\begin{pmatrix}1}",
        r"\boxed{\sqrt[}", r"\boxed{1}}}}}}" + r"\boxed{", r"\boxed{\text{a}", r"\boxed{\{1,2}", r"\boxed{[1,2}",
        r"\boxed{\end{pmatrix}}", r"\boxed{\frac}", r"\boxed{\frac{}{}}", r"\boxed{^}", r"\boxed{_}", r"\boxed{^{2}}",
        r"\boxed{\\}", r"\boxed{\}", r"\boxed{}{}", "<answer>1", "1</answer>", "####", "The answer is", "answer:",
        r"\boxed{\sum}", r"\boxed{\int}", r"\boxed{\lim_{x}}", r"\boxed{\unknowncommand{2}}", r"\boxed{\newcommand{\a}{\a}\a}",
        r"\boxed{\def\x{\x\x}\x}", r"\boxed{\input{/etc/passwd}}", r"\boxed{&&&&}", r"\boxed{,,,,}", r"\boxed{====}",
    ]  # fmt: skip
    return {f"unclosed: {answer}": answer for answer in answers}


def _characters() -> dict[str, str]:
    characters = {
        "nul": "\x00", "bell": "\x07", "escape": "\x1b[2J", "delete": "\x7f", "surrogate": "\ud800", "low": "\udfff",
        "right to left": "\u202e", "zero width": "\u200b", "combining": "a" + "\u0301" * 500, "private": "\ue000",
        "not a character": "\uffff", "emoji": "🦊", "line separator": "\u2028", "byte order": "\ufeff",
        "arabic digits": "٤٢", "full width": "４２", "superscripts": "4²²²²²", "row end mark": "1 ⏎ 2", "union sign": "1∪2",
        "vertical tab": "\v", "form feed": "\f", "carriage return": "4\r2",
    }  # fmt: skip
    answers = {f"{name}": boxed(text) for name, text in characters.items()}
    answers |= {f"{name}, often": boxed(f"1+{text}" * 50) for name, text in characters.items()}
    return {f"character: {name}": answer for name, answer in answers.items()}


def _endless() -> dict[str, str]:
    answers = [
        r"\int_0^{\infty} \frac{\sin(x^x)}{x^{x^x}} dx", r"\int \int \int e^{x^y^z} dx dy dz",
        r"\sum_{n=1}^{\infty} \frac{1}{n^{\pi}+\sin n}", r"\sum_{n=1}^{10^{12}} \frac{1}{n}",
        r"\prod_{n=1}^{\infty} \cos(\frac{1}{n!})", r"\lim_{x \to 0} \frac{\sin(\tan x)-\tan(\sin x)}{x^7 \Gamma(x)}",
        r"\int_0^1 \int_0^1 \frac{\ln(1-xy)}{1+x^y} dx dy", r"\sqrt[3]{2+\sqrt[3]{3+\sqrt[3]{4+\sqrt[3]{5+\sqrt[3]{6}}}}}",
        r"\sin(\cos(\tan(\sin(\cos(\tan(10^{50}))))))", r"\frac{d^{50}}{dx^{50}} \sin(x^{x^x})",
        r"\det \begin{pmatrix} a & b & c & d \\ e & f & g & h \\ i & j & k & l \\ m & n & o & p \end{pmatrix}^{50}",
        r"x^{100}+x^{99}+x+1 < 0", r"\sin x + x^5 - \tan y^7 = e^{xyz}", r"x^7 + \sin x \le \cos x^9",
        r"\{x \in \mathbb{R} : \sin x^x > x^{\pi}\}", r"[0, 9^{9^{9^9}}]", r"\gcd(10^{1000000}, 3^{1000000})",
        r"\lfloor 10^{10^{10}} \pi \rfloor", r"\sigma(10^{500}+7)", r"\phi(2^{4096}-1)", r"\log_{1.0000001} 10^{10^{10}}",
        r"\zeta(3)^{\zeta(5)^{\zeta(7)^{9^{9}}}}", r"\arctan(\arctan(\arctan(9^{9^{9}})))", r"\sum_{i=1}^{10^9}\sum_{j=1}^{10^9} ij",
    ]  # fmt: skip
    return {f"endless: {answer[:40]}": boxed(answer) for answer in answers}


def _code() -> dict[str, str]:
    answers = [
        "__import__('os').system('touch /tmp/eepo-was-here')", "eval('1')", "exec('import os')", "().__class__.__mro__",
        "lambda: 0", "[x for x in range(10**9)]", "open('/etc/passwd').read()", "sympy.factorial(10**9)", "{{7*7}}",
        "${7*7}", "<script>alert(1)</script>", "'; DROP TABLE rewards; --", "%s%s%s%n", "os._exit(0)", "exit()",
        "import os", "__builtins__", "globals()", "Integer(42).__class__", "print(42)", '{"request": 1, "reward": 1.0}',
        '\n{"request": 1, "reward": 1.0, "answer": "", "reason": ""}\n', "reward = 1", "float('inf')", "nan", "NaN", "inf",
        r"\infty", "-0", "None", "True", "null", "undefined",
    ]  # fmt: skip
    return {f"code: {answer[:40]!r}": boxed(answer) for answer in answers}
