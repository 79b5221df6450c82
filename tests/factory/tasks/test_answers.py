"""Comparison of answers, by a table of equal and unequal answers as people and models write them. math-verify compares formulas in the sandbox."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from factory.tasks.answer_forms import NumberValue, parse_answer
from factory.tasks.exact_answer import extract_answer, is_same_answer
from factory.tasks.items import MathsItem
from factory.tasks.policy import TaskLimits
from factory.tasks.verifiers import check_maths_answers

LIMITS = TaskLimits(formula_cpu_seconds=5)
SAME, OTHER = True, False

# (gold, what a model writes, is it right?). No library is asked.
FORMS = [
    # worked solutions as gold and as answer (case 1)
    (r"\boxed{5}", r"\boxed{5}", SAME), (r"\boxed{5}", "5", SAME), (r"2 + 3 = \boxed{5}.", "#### 5", SAME), ("#### 18", r"\boxed{18}", SAME),
    ("She sells 9 * 2 = 18.\n#### 18", "The answer is 18.", SAME), (r"\boxed{5}", r"\boxed{6}", OTHER), (r"thus $\boxed{\frac{1}{2}}$", "0.5", SAME),
    # words and marks at the number (case 2)
    ("18", "So she sells 18, as asked.", SAME), ("18", "#### 18 dollars", SAME), ("18", "#### **18**", SAME), ("18", r"18\text{ cm}", SAME),
    ("18", "**Answer:** 18", SAME), ("18", "The final answer is $18$. I hope it is correct.", SAME), ("18", "#### $18.00", SAME), ("18", "18.", SAME),
    ("18", "That is 18 apples in all.", SAME), ("18", "#### 18, as asked", SAME), ("18", "#### = 18", SAME), ("18", "`18`", SAME),
    ("18", r"\(18\)", SAME), ("18", r"\[ x = 18 \]", SAME), ("18", "#### not 18", OTHER), ("18", "#### at most 18", OTHER),
    ("18", "#### 18 and a half", OTHER), ("18", "#### less than 18", OTHER), ("18", "#### 18 or 19", OTHER), ("18", "no answer", OTHER),
    ("18", "I do not know.", OTHER), ("18", "", OTHER), ("18", "####", OTHER), ("5", "no", OTHER), ("0", "none", OTHER), ("0", "no answer", OTHER),
    # mixed numbers, tuples, thousands (case 3)
    ("3/2", "1 1/2", SAME), ("1.5", "1 1/2", SAME), ("11/2", "1 1/2", OTHER), ("5.5", "1 1/2", OTHER), (r"1\frac{1}{2}", "3/2", SAME),
    (r"1\frac12", "1.5", SAME), ("11/2", r"1\frac12", OTHER), ("1 1/2", "11/2", OTHER), ("-3/2", "-1 1/2", SAME), ("-1/2", "-1 1/2", OTHER),
    ("3/2", "1½", SAME), ("11/2", "1½", OTHER), ("3.5", "Use 3 1/2 cups.", SAME), ("1/2", "Use 3 1/2 cups.", OTHER), ("13/2", "1 3/2", OTHER),
    ("1200", "(1,200)", OTHER), ("(1,200)", "1,200", OTHER), ("(1,200)", "(1, 200)", SAME), ("1200", "The point is (1,200).", OTHER),
    ("1200", "1{,}200", SAME), ("1200", r"1\,200", SAME), ("1200", "1,200", SAME), ("1200", r"1,\!200", SAME), ("1200", "1\u202f200", SAME),
    ("1200", r"\$1{,}200", SAME), ("1200000", "1,200,000", SAME), ("1200", "1, 200", OTHER), ("1200", "1 200", OTHER), ("120", "1,20", OTHER),
    ("12345", r"12\,345", SAME), ("357", r"12\,345", OTHER), ("1.2", "1,2", OTHER), ("1200", "That makes $1,200 in all.", SAME),
    # percent and TeX's shorthands (case 4)
    ("60", "60%", SAME), ("60%", "60%", SAME), ("60", r"60\%", SAME), ("60%", r"60\%", SAME), ("60%", "60", SAME), ("60", "60 percent", SAME),
    ("60", "0.6", OTHER), ("60%", "0.6", SAME), ("0.6", "60%", SAME), ("0.6", "0.6%", OTHER), ("0.6%", "0.6", OTHER), ("60%", "6%", OTHER),
    ("0.6", "60", OTHER), ("1/2", r"\frac12", SAME), ("1/2", ".5", SAME), ("1/2", r"\tfrac{1}{2}", SAME), ("1/2", r"\dfrac12", SAME),
    ("1/2", "50%", SAME), ("-1/2", r"-\frac{1}{2}", SAME), ("-1/2", r"\frac{-1}{2}", SAME), ("1/2", r"\frac21", OTHER), ("12", r"\frac12", OTHER),
    ("1/2", "0.50", SAME), ("1/3", "0.333", OTHER), ("1/3", "0.3333333333333333", OTHER), ("2/6", "1/3", SAME), ("1/2", "1/0", OTHER),
    # units
    ("5 cm", "5 cm", SAME), ("5 cm", r"5\text{ cm}", SAME), ("5 cm", r"5\,\mathrm{cm}", SAME), ("5 cm", "5", SAME), ("5", "5 cm", SAME),
    ("5 cm", "5 m", OTHER), ("500 cm", "5 m", SAME), ("5 cm", "5 centimeters", SAME), ("5 cm^2", "5 cm", OTHER),
    ("5 cm^2", "5 square centimetres", SAME),
    ("60 km/h", "60 kilometers per hour", SAME), ("60 km/h", "60 km", OTHER), ("90", r"90^\circ", SAME), (r"90^{\circ}", "90 degrees", SAME),
    ("1 hour", "60 minutes", SAME), ("1 hour", "1 minute", OTHER), ("$5", "€5", OTHER), ("$0.50", "50 cents", SAME), ("$5", "5 dollars", SAME),
    ("5 cm", "5 apples", OTHER), ("5 dogs", "5 cats", OTHER), ("5 dogs", "5 dogs", SAME), ("5000000", "5 million", SAME), ("5", "5 million", OTHER),
    ("24", "2 dozen", SAME), ("5 cm", "He walks 5 m.", OTHER),
    # signs and powers of ten
    ("5", "-5", OTHER), ("-5", "−5", SAME), ("-5", "negative 5", SAME), ("5", "+5", SAME), ("-5", "-$5", SAME), ("5", "so 10-5", SAME),
    ("1000", "10^{3}", SAME), ("103", "10^{3}", OTHER), ("1000", "10³", SAME), ("103", "10³", OTHER), ("1200", r"1.2 \times 10^{3}", SAME),
    ("1200", "1.2e3", SAME), ("1.23", "1.2e3", OTHER), ("0.001", "10^{-3}", SAME), ("2", "2^{10}", OTHER), ("210", "210^{3}", OTHER),
    ("7", r"\boxed{3+4}", OTHER), ("7", r"\boxed{3+4=7}", SAME), ("10", "10^{5000000}", OTHER),
    # ratios, dates, numbers with a base
    ("3:4", "3:4", SAME), ("3:4", "4:3", OTHER), ("3/4", "3:4", OTHER), ("34", "3:4", OTHER), ("4", "at 3:04", OTHER),
    ("2020", "on 12/25/2020", OTHER),
    ("12/25", "12/25/2020", OTHER), ("12/25/2020", "12/25/2020", SAME), ("1010_2", "1010_{2}", SAME), ("1010_2", "1010", OTHER),
    ("13", "13_5", OTHER),
    # names, tuples, intervals, sets, lists
    ("5", "x=5", SAME), ("x=5", "5", SAME), ("x=5", "y=5", OTHER), ("y=2x+1", "2x+1", OTHER), ("2x+1", "y=2x+1", SAME), ("5", "x=6", OTHER),
    ("(1,2)", "(2,1)", OTHER), ("(1,2)", "[1,2]", OTHER), ("[1,2)", "[1,2)", SAME), ("[1,2)", "[1,2]", OTHER),
    (r"(\frac12,3)", r"\left(0.5, 3\right)", SAME),
    (r"\{1,2\}", r"\{2,1\}", SAME), (r"\{1,2\}", "1, 2", SAME), ("1, 2", "2 and 1", SAME), ("1, 2", "1", OTHER), ("1, 2", "1, 2, 3", OTHER),
    (r"\{1,2\}", "(1,2)", OTHER), ("1, 1, 2", "1, 2, 2", OTHER), ("x=1, x=2", "x=2 or x=1", SAME), (r"\pm 2", "2, -2", SAME), ("2", r"\pm 2", OTHER),
    (r"(-\infty, 3]", r"(-∞,3]", SAME), (r"(-\infty, 3]", r"(\infty, 3]", OTHER), (r"[0,1]\cup[2,3]", r"[2,3]\cup[0,1]", SAME),
    # words
    (r"\text{Monday}", "monday", SAME), ("Monday", "Tuesday", OTHER), ("A", "(A)", SAME), ("A", "B", OTHER), ("x", "X", OTHER),
    ("even", r"\boxed{\text{even}}", SAME),
    # replies as models write them
    ("42", "Let's see. 6 times 7 is 42. So the answer is 42 apples.", SAME), ("42", r"The answer is: $\boxed{42}$.", SAME),
    ("42", r"**Final Answer:** The final answer is $\boxed{42}$", SAME), ("42", "Therefore, she has $42 left over after 3 days.", OTHER),
    ("42", r"So, she has \$42 left.", SAME), ("42", "Answer: 42\n", SAME), ("42", "answer = 42", SAME),
    ("42", "The answer is forty-two.", OTHER), ("3", "x = 3 or x = -3", OTHER), ("3,-3", "x = 3 or x = -3", SAME), ("3", "**3**", SAME),
    ("3", "The answer is **3**.", SAME), ("3", "The answer is: **3**", SAME), ("0.25", r"\frac{1}{4}", SAME), ("1/4", "25%", SAME),
    ("1,000,000", "1 million", SAME), ("$1,000,000", r"\$1,000,000", SAME), ("10:30", "10:30", SAME),
    ("10:30", "The answer is 10:30.", SAME), ("10:30", "It leaves at 10:30 a.m.", SAME),
    (r"2\sqrt{3}", r"The answer is $2\sqrt{3}$.", SAME), (r"2\sqrt{3}", r"So $x = 2\sqrt{3}$.", SAME),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", SAME),
    (r"(3, \frac{\pi}{2})", r"The polar coordinates are $\boxed{\left( 3, \frac{\pi}{2} \right)}.$", SAME),
    (r"\frac{9}{2}", r"\boxed{4.5}", SAME), ("5", r"\boxed{5\text{ units}}", SAME), ("12", r"\boxed{12\mbox{ inches}^2}", SAME),
    ("12", "12 square units", SAME), (r"\text{(A)}", r"\boxed{A}", SAME), (r"\textbf{(B)}", r"\boxed{\text{B}}", SAME),
    ("C", "The answer is (C).", SAME), ("C", "The answer is C.", SAME), ("C", "Answer: C", SAME), ("p - q", r"\boxed{p-q}", SAME),
    (r"-\frac{2}{3}", "-2/3", SAME), (r"-\frac{2}{3}", "2/3", OTHER), (r"\frac{-2}{3}", r"-\frac23", SAME), ("1.5", "3/2", SAME),
    (r"150\%", "1.5", SAME), ("6", "6 and 7", OTHER), ("6", "6.0", SAME), ("6", "6.01", OTHER), (r"x \in [-2,7]", "[-2,7]", SAME),
    ("[-2,7]", r"x \in [-2,7]", SAME), ("3.14", r"\pi", OTHER), ("70", "70 mph", SAME), ("70 mph", "70", SAME),
    ("70 mph", "70 km/h", OTHER), ("2", "2 hours", SAME), ("2 hours", "120 minutes", SAME), ("$5", "5 euros", OTHER),
    ("18", "18 is the answer.", SAME), ("18", "18 dollars per day", SAME), ("18", "She makes $18 every day at the farmer's market.", SAME),
    ("18", "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer’s market.\n#### 18", SAME), ("3", "3rd", OTHER), ("7", "7th", OTHER),
    ("1", "1.", SAME), ("100", "100%", SAME), ("1", "100%", SAME), ("10", "ten", OTHER), ("8", "8^2", OTHER), ("64", "8^2", OTHER),
    ("0", "-0", SAME), ("9", "It is 9 (nine).", SAME), ("1/2", "one half", OTHER), ("5", "√25", OTHER), ("2x", "x*2", OTHER),
    ("14", "The answer is 14, because 7+7=14.", SAME), ("14", "The answer is 14 since 7 * 2 = 14 and not 15", SAME),
    ("25", "There are 25 (not 26) apples", OTHER), ("17", r"\boxed{17} and then we check: 17+1=18", SAME), ("5", "$$5$$", SAME),
    ("5", "$$x=5$$", SAME), ("5", r"\begin{align*} x &= 5 \end{align*}", SAME), ("12", r"\boxed{\$12}", SAME),
    ("12.50", r"\boxed{\$12.50}", SAME), ("1200", r"\boxed{1,\!200}", SAME), ("1200", r"\boxed{1{,}200}", SAME),
    ("even", r"The function is \boxed{\text{even}}.", SAME), ("7", "#### 7\n#### 8", OTHER), ("8", "#### 7\n#### 8", SAME),
    ("11", "11 apples, 12 pears", OTHER), ("3/4", "3 / 4", SAME), ("0.75", "3 over 4", OTHER), ("36", "6^2 = 36", SAME),
    (r"(-\infty,-4)\cup(-4,\infty)", r"(-\infty, -4) \cup (-4, \infty)", SAME), ("4", r"4\pi", OTHER), (r"4\pi", "4", OTHER),
    (r"4\pi", r"\boxed{4\pi}", SAME), (r"10\pi", "10π", SAME), ("6 + 9i", r"\boxed{6+9i}", SAME), ("6+9i", "6-9i", OTHER),
    (r"1 \pm \sqrt{19}", r"\boxed{1\pm\sqrt{19}}", SAME), ("1000", "1.000", OTHER), ("1", "1.000", SAME), ("5", "five", OTHER),
    ("72", "Natalia sold 48/2 = 24 clips in May. In total 48+24 = 72 clips.", SAME), ("y=2x+3", r"\boxed{y = 2x+3}", SAME),
    ("3", r"\boxed{x=3}", SAME), (r"\$3.50", r"\$3.50", SAME), ("3.5", "$3.50", SAME), (r"5 \text{ and } 7", "5, 7", SAME),
    ("2:3", "2 : 3", SAME), ("1.23e-5", r"1.23 \times 10^{-5}", SAME), ("10", r"\boxed{10}\%", SAME), ("20", r"20\,\%", SAME),
    ("15", r"15 ^\circ", SAME), ("-1", "−1", SAME), ("50", "fifty (50)", SAME), ("1/3", "0.33", OTHER), ("90", "The angle is 90°.", SAME),
    ("24", "The total is 24.\n\nHope this helps! Let me know if you have 2 more questions.", OTHER),
]  # fmt: skip

# Formulas, which math-verify compares in the sandbox.
FORMULAS = [
    (r"x^2+2x+1", r"\boxed{(x+1)^2}", SAME), (r"x^2+2x+1", r"\boxed{(x+1)^3}", OTHER), (r"\frac{\sqrt{3}}{3}", r"$\frac{1}{\sqrt 3}$", SAME),
    (r"2\sqrt2", r"\sqrt{8}", SAME), (r"\sqrt{2}", r"1.41421356", OTHER), (r"\pi", "3.14159265358979", OTHER), (r"\frac{\pi}{2}", r"\pi/2", SAME),
    (r"2\pi", r"2\pi\text{ cm}", SAME), ("2^{10}", "1024", SAME), ("2A", "2a", OTHER), ("p-q", "q-p", OTHER), ("0.5x", r"\frac{x}{2}", SAME),
    (r"10^{-20}x", r"10^{-30}x", OTHER), (r"\sqrt{x^2}", "x", OTHER), ("x < 3", "3 > x", SAME), ("x < 3", r"x \le 3", OTHER),
    ("x < 3", "x > 3", OTHER),
    ("x+y=5", "y=5-x", SAME), ("x+y=5", "x+y=6", OTHER), (r"\{\sqrt2, -\sqrt2\}", r"\pm\frac{2}{\sqrt2}", SAME),
    (r"(\sqrt4, \sqrt9)", "(2, 3)", SAME),
    (r"(\sqrt4, \sqrt9)", "(3, 2)", OTHER), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", OTHER),
    (r"\sqrt{2}\cdot 10^{-20}", r"\sqrt{3}\cdot 10^{-20}", OTHER), (r"\sqrt{10^{40}+1}", "10^{20}", OTHER), ("x^2=-1", "x^2=-4", OTHER),
    ("x=x+1", "x=x+2", OTHER),
    (r"x!", r"__import__('os').system('true')", OTHER), (r"x^{10}", "x^10", SAME), ("x", r"\boxed{\frac{x}", OTHER),
]  # fmt: skip


def right(gold: str, said: str) -> bool:
    """Without the library."""
    answer = extract_answer(said)
    return answer is not None and is_same_answer(answer, extract_answer(gold) or gold)


def item(gold: str | int | float) -> MathsItem:
    return MathsItem(id=1, question="?", answer=gold)


@pytest.mark.parametrize(("gold", "said", "same"), FORMS)
def test_answers_are_equal_only_if_their_mathematical_forms_are_equal(gold: str, said: str, same: bool) -> None:
    assert right(gold, said) is same


@pytest.mark.slow("imports sympy in the sandbox")
def test_math_verify_compares_formulas_in_the_sandbox() -> None:
    found = check_maths_answers([(item(gold), said) for gold, said, _ in FORMULAS], LIMITS)
    assert {pair: one.right for pair, one in zip(FORMULAS, found, strict=True)} == {pair: pair[2] for pair in FORMULAS}


def test_a_comparison_that_never_ends_counts_as_not_equal() -> None:
    """Another pair in the same call is still compared."""
    slow, other = "9^{9^{9^{9}}}+x", "9^{9^{9^{8}}}+x"
    found = check_maths_answers(
        [(item(slow), f"\\boxed{{{other}}}"), (item("x+1"), r"\boxed{1+x}")],
        LIMITS.model_copy(update={"formula_cpu_seconds": 1}),
    )
    assert [(one.right, one.stopped) for one in found] == [(False, "cpu"), (True, "")]


@pytest.mark.parametrize("gold", sorted({gold for gold, _, _ in FORMS + FORMULAS}))
def test_every_right_answer_equals_itself(gold: str) -> None:
    answer = extract_answer(gold) or gold
    assert right(gold, gold) and right(gold, f"#### {answer}") and right(gold, f"So \\boxed{{{answer}}}.")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789.,/%${}\\ ()[]-^+=xeabcfr", max_size=24), st.text(max_size=40))
def test_any_text_can_be_parsed_and_equals_itself(mathematical: str, text: str) -> None:
    for one in (mathematical, text):
        assert parse_answer(one) is None or is_same_answer(one, one, lambda gold, said: gold == said)
        assert extract_answer(one) is None or isinstance(extract_answer(one), str)


@settings(max_examples=60, deadline=None)
@given(st.fractions(max_denominator=999))
def test_a_fraction_is_parsed_to_its_exact_value(value: Fraction) -> None:
    found = parse_answer(str(value))
    assert isinstance(found, NumberValue) and found.value == value
