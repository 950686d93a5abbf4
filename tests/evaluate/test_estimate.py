"""pass@k and the standard error against slow, obvious references."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

import pytest

from streamrl.evaluate.estimate import mean, pass_at_k


def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one() -> None:
    for answers in range(1, 9):
        for right, k in itertools.product(range(answers + 1), range(1, answers + 1)):
            drawn = list(itertools.combinations([1] * right + [0] * (answers - right), k))
            assert pass_at_k(answers, right, k) == pytest.approx(sum(map(any, drawn)) / len(drawn), abs=1e-15)


@pytest.mark.parametrize(("answers", "right", "k"), [(10_000, 1, 1), (4096, 3, 2048), (10**6, 2, 7), (200, 199, 1)])
def test_pass_at_k_keeps_its_digits_where_the_binomials_are_huge(answers: int, right: int, k: int) -> None:
    wrong = Fraction(math.comb(answers - right, k), math.comb(answers, k))
    assert pass_at_k(answers, right, k) == pytest.approx(float(1 - wrong), rel=1e-12)


def test_pass_at_k_has_no_bias() -> None:
    chance, answers = Fraction(3, 10), 6
    for k in range(1, answers + 1):
        expected = sum(
            math.comb(answers, right) * chance**right * (1 - chance) ** (answers - right)
            * Fraction(pass_at_k(answers, right, k))
            for right in range(answers + 1)
        )  # fmt: skip
        assert float(expected) == pytest.approx(float(1 - (1 - chance) ** k), abs=1e-12)


@pytest.mark.parametrize(("answers", "right", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be_estimated(answers: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="allowed:"):
        pass_at_k(answers, right, k)


def test_a_mean_has_the_standard_error_of_its_prompts() -> None:
    values = [0.0, 0.5, 0.5, 1.0, 0.25]
    found = mean(values)
    assert found is not None
    assert (found.value, found.prompts) == (pytest.approx(statistics.fmean(values)), 5)
    assert found.error == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert mean([]) is None
    assert mean([0.5]) is not None
    assert mean([0.5]).error is None
