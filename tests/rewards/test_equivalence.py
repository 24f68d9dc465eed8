r"""Checks that equal answers are accepted and different answers are rejected.

Each pair tests a rule, or a mistake that a lenient grader makes.
"""

from __future__ import annotations

import contextlib

import pytest

from eepo.rewards.equivalence import Unparsable, canonical, same_answer

SAME = [
    # spelling
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{1}{2}", r"$\tfrac{1}{2}$"),
    ("(1,2)", r"\left( 1 ,\, 2 \right)"),
    (r"\mathbf{2340}", "2340"),
    (r"\dfrac{1}{29,\!322,\!216}", r"\frac{1}{29322216}"),
    ("y^{\\prime}+r y-r x(t)=0", "y' + ry - rx(t) = 0"),
    # numbers
    ("1,234", "1234"),
    ("100,200", "100200"),
    ("0.5", r"\frac{1}{2}"),
    (r"3\frac{1}{2}", "3.5"),
    ("1/3", "0.3333333333"),
    (r"\frac{\pi}{4}", "0.78539816"),
    # e-notation
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("4.5e33", "4.5E33"),
    ("-1./3", r"-\frac13"),
    ("np.arcsin(10/13)", r"\arcsin(10/13)"),
    # bases
    ("52_8", "52_{8}"),
    ("52_8", "52"),
    ("-37_8", "-37"),
    ("0.0011_2", "0.0011_{2}"),
    ("52_8", r"52_{\text{eight}}"),
    # units and percent
    (r"15\mbox{ cm}^2", "15"),
    (r"15\mbox{ cm}^2", r"15 \text{ square centimeters}"),
    ("90^\\circ", "90"),
    ("90^\\circ", r"90\text{ degrees}"),
    (r"\$5.50", "5.5"),
    (r"\$5.50", r"5.50\text{ dollars}"),
    (r"16\text{ daps}", "16"),
    (r"12\sqrt{13}\text{ feet}", r"12\sqrt{13}"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    ("0.5", r"50\%"),
    (r"0.56 = 56\%", r"56\%"),
    # variables stay variables
    ("a + b + c", "c+a+b"),
    (r"\frac{37}{4} m", "9.25m"),
    ("2s", "s+s"),
    # names
    ("x=3", "3"),
    ("3", "x = 3"),
    ("f(x)=2 x", "2x"),
    (r"AB=12+12\sqrt{3}", r"12\sqrt{3}+12"),
    (r"x \in [0,1]", "[0,1]"),
    (r"\$\dfrac23 \approx \$0.67", r"\frac23"),
    # several answers, sets
    ("1,2", "2, 1"),
    (r"\{1,2\}", "2,1"),
    (r"2, 3, \text{ and } 4", "4,3,2"),
    (r"12\text{ and }13", "13, 12"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    ("AB=9, CD=4", "CD=4, AB=9"),
    ("E_{1},E_{2}", "E_2, E_1"),
    (r"\text{A, B}", "B, A"),
    # tuples, intervals, unions, matrices
    (r"(3, \frac{\pi}{2})", r"\left(3,\pi/2\right)"),
    ("(1,2)", "1, 2"),
    (r"(-\infty,3) \cup (3,\infty)", r"(3,\infty) \cup (-\infty,3)"),
    (r"-80\leq g(x)\leq 82", "[-80,82]"),
    (
        r"\begin{pmatrix} -40/29 \\ 16/29 \end{pmatrix}",
        r"\begin{bmatrix} -\frac{40}{29} \\ \frac{16}{29} \end{bmatrix}",
    ),
    (r"\begin{pmatrix} 7 \\ 5 \end{pmatrix}", "(7,5)"),
    # words
    (r"\text{(D)}", "D"),
    (r"\text{Tuesday}", "tuesday"),
    ("1:4", "1 : 4"),
    (r"4\!:\!51\!:\!06 \text{ p.m.}", r"4:51:06\text{ p.m.}"),
    # formulas
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt2}"),
    (r"2\sqrt{2}+\sqrt[3]{5}", r"\sqrt[3]{5}+\sqrt{8}"),
    ("6 - 5i", "-5i+6"),
    ("2x - y + 2z - 18 = 0", "2x-y+2z=18"),
    (r"\frac{\cos (2 t)}{15}+C_{1} e^{t}", r"C_1 e^t + \frac{1}{15}\cos(2t)"),
    (r"\frac{1}{2}(\exp{a*t} + \exp{-a*t})", r"\frac{e^{at}+e^{-at}}{2}"),
    (r"\lfloor\frac{2 n-1}{5}\rfloor", r"\left\lfloor (2n-1)/5 \right\rfloor"),
]

DIFFERENT = [
    ("52_8", "52_9"),
    ("52_8", "42"),
    ("52_8", "42_{10}"),
    ("52_8", "2A_{16}"),
    ("1_6", "1_7"),
    ("-37_8", "-37_9"),
    ("0.0011_2", "0.0011_3"),
    ("2^{2008} - 2", "2^{2008} - 3"),
    (r"\approx 8.24 \text{ mph}", r"\approx 8.25 \text{ mph}"),
    (r"0.56 = 56\%", r"0.56 = 57\%"),
    (r"\$\dfrac23 \approx \$0.67", r"\$\dfrac23 \approx \$0.68"),
    (r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor\sqrt{n-2}\rfloor"),
    ("x^2+y^2 = 13", "x^2+y^2 = 14"),
    (".0000672", ".0000673"),
    ("12345678.5", "12345678.6"),
    ("4.5e33", "4.5e34"),
    ("4.5e33", "4.5"),
    ("1/3", "0.3333"),
    (r"\sqrt{2}", "1.41"),
    ("0.5", "50"),
    ("50", "0.5"),
    ("10", "1 0"),
    ("a + b + c", "a + b"),
    ("a+b+c", "a+b+d"),
    (r"15\mbox{ cm}^2", r"15\mbox{ cm}^3"),
    (r"15\mbox{ cm}^2", "16"),
    (r"100\text{ cm}", r"1\text{ m}"),
    (r"9\text{ a.m.}", r"9\text{ p.m.}"),
    (r"12\text{ degrees}", "13"),
    ("x=3", "4"),
    ("x=1", "y=2"),
    ("f(x)=2x", "f(x)=3x"),
    ("y=2x+3", "y=2x+4"),
    ("1,2", "1,3"),
    ("1,2", "1"),
    ("1", "1,2"),
    ("2", "2,2"),
    ("16,3,1,1", "16,3,1"),
    ("(1,2)", "(2,1)"),
    ("(2,3)", "2"),
    ("[0,1)", "(0,1]"),
    ("[0,1)", "[0,1]"),
    (r"(-\infty,3)", r"(-\infty,4)"),
    (r"(0,1) \cup (2,3)", "(0,1)"),
    (r"\begin{pmatrix} 7 \\ 5 \end{pmatrix}", r"\begin{pmatrix} 5 \\ 7 \end{pmatrix}"),
    (
        r"\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix}",
        r"\begin{pmatrix} 1 & 0 \\ 0 & 4 \end{pmatrix}",
    ),
    (r"\text{(D)}", "C"),
    ("E", "F"),
    ("C", "5"),
    ("3", r"\text{three}"),
    ("5", "x"),
    ("i", "1"),
    ("90", r"\pi/2"),
    ("1:4", "1:5"),
    ("2x+3", "2x+4"),
    ("x^2", "x^3"),
    ("x_1", "x_2"),
    ("E_{1},E_{2}", "E_1,E_3"),
    ("2x - y + 2z - 18 = 0", "2x-y+2z=19"),
    (r"\frac{1}{7}\triangle ABC", r"\frac{1}{8}\triangle ABC"),
    (r"\lfloor\frac{2 n-1}{5}\rfloor", r"\lfloor\frac{2 n-1}{6}\rfloor"),
]


@pytest.mark.parametrize(("gold", "answer"), SAME)
def test_equal_answers_are_accepted(gold: str, answer: str) -> None:
    assert same_answer(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_answers_are_rejected(gold: str, answer: str) -> None:
    with contextlib.suppress(Unparsable):
        assert same_answer(gold, answer) is None


@pytest.mark.parametrize("gold", sorted({gold for gold, _ in SAME + DIFFERENT}))
def test_every_answer_equals_itself(gold: str) -> None:
    assert same_answer(gold, gold) == "same text"
    assert same_answer(gold, f"$ {gold} $") == "same text"


def test_broken_latex_is_unparsable() -> None:
    with pytest.raises(Unparsable):
        same_answer("x^2+1", r"\frac{\frac")


@pytest.mark.parametrize(
    ("left", "right"), [("0.5", r"\frac{1}{2}"), ("1,000", "1000"), (r"\$5", "5.0"), ("x", " x ")]
)
def test_equal_answers_have_one_key(left: str, right: str) -> None:
    assert canonical(left) == canonical(right)


def test_different_answers_have_different_keys() -> None:
    assert len({canonical(text) for text in ("1", "2", "1/2", "x", "y", "(1,2)", "(2,1)")}) == 7
