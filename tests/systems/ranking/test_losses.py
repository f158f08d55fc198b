"""Losses of lists against slow loops over documents, and what they say of errors and entropies."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.systems.ranking.losses import LOSSES, PAD, ListLoss

Numbers = list[float]


def ideal(y: Numbers) -> float:
    return sum((2**g - 1) / math.log2(i + 2) for i, g in enumerate(sorted(y, reverse=True)))


def pairs(y: Numbers) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(y)) for j in range(len(y)) if y[i] > y[j]]


def slow_listnet(s: Numbers, y: Numbers) -> float:
    target, given = ([math.exp(v - max(values)) for v in values] for values in (y, s))
    return -sum(t / sum(target) * math.log(g / sum(given)) for t, g in zip(target, given, strict=True))


def slow_ranknet(s: Numbers, y: Numbers) -> float:
    found = [math.log(1 + math.exp(s[j] - s[i])) for i, j in pairs(y)]
    return sum(found) / len(found) if found else 0.0


def slow_lambdarank(s: Numbers, y: Numbers) -> float:
    place = {d: r for r, d in enumerate(sorted(range(len(s)), key=lambda d: -s[d]))}
    total = 0.0
    for i, j in pairs(y):
        gain = 2 ** y[i] - 2 ** y[j]
        discount = 1 / math.log2(place[i] + 2) - 1 / math.log2(place[j] + 2)
        total += abs(gain * discount) / ideal(y) * math.log(1 + math.exp(s[j] - s[i]))
    return total


def slow_approxndcg(s: Numbers, y: Numbers) -> float:
    if not ideal(y):
        return 0.0
    found = 0.0
    for i in range(len(s)):
        rank = 1 + sum(1 / (1 + math.exp(10 * (s[i] - s[j]))) for j in range(len(s)) if j != i)
        found += (2 ** y[i] - 1) / math.log2(1 + rank)
    return 1 - found / ideal(y)


SLOW: dict[str, Callable[[Numbers, Numbers], float]] = {
    "listnet": slow_listnet,
    "ranknet": slow_ranknet,
    "lambdarank": slow_lambdarank,
    "approxndcg": slow_approxndcg,
}


@st.composite
def lists(draw: st.DrawFn) -> list[tuple[Numbers, Numbers]]:
    """Some lists of 1 to 6 documents: scores that differ, and grades."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        many = draw(st.integers(1, 6))
        order = draw(st.permutations(range(many)))
        grades = draw(st.lists(st.integers(0, 4), min_size=many, max_size=many))
        found.append(([0.37 * place - 0.8 for place in order], [float(g) for g in grades]))
    return found


def padded(some: list[tuple[Numbers, Numbers]], more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(s) for s, _ in some) + more
    scores, grades = (torch.full((len(some), longest), value, dtype=torch.float64) for value in (7.0, PAD))
    for i, (s, y) in enumerate(some):
        scores[i, : len(s)], grades[i, : len(y)] = (torch.tensor(v, dtype=torch.float64) for v in (s, y))
    return scores, grades


@pytest.mark.parametrize("name", list(LOSSES))
@settings(max_examples=30, deadline=None)
@given(some=lists(), more=st.integers(0, 3))
def test_a_loss_is_that_of_a_slow_loop_over_the_documents_of_each_list(
    name: str, some: list[tuple[Numbers, Numbers]], more: int
) -> None:
    scores, grades = padded(some, more)
    slow = [SLOW[name](s, y) for s, y in some]
    assert LOSSES[name](scores, grades).tolist() == pytest.approx(slow, rel=1e-9, abs=1e-12)
    assert float(ListLoss(name, 5)(scores, grades)) == pytest.approx(np.mean(slow), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_step_along_the_gradient_mends_the_order_and_padding_has_none(name: str) -> None:
    scores, grades = padded([([0.3, 0.1, 0.2], [0.0, 2.0, 1.0])], more=2)
    scores.requires_grad_()
    (slope,) = torch.autograd.grad(LOSSES[name](scores, grades).sum(), scores)
    assert slope[0, 0] > 0 > slope[0, 1]
    assert slope[0, 3:].tolist() == [0.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(some=lists(), more=st.integers(0, 2))
def test_errors_are_between_the_grade_of_a_document_and_that_of_its_place(
    some: list[tuple[Numbers, Numbers]], more: int
) -> None:
    errors = ListLoss("listnet", 5).errors(*padded(some, more))
    for i, (s, y) in enumerate(some):
        falling, best = sorted(range(len(s)), key=lambda d: -s[d]), sorted(y, reverse=True)
        slow = {d: (best[place] - y[d]) ** 2 for place, d in enumerate(falling)}
        assert errors[i, : len(s)].tolist() == [slow[d] for d in range(len(s))]
        assert (errors[i, len(s) :] == -1).all()
    assert errors.max() <= 16


@settings(max_examples=30, deadline=None)
@given(some=lists(), more=st.integers(0, 2))
def test_entropy_is_that_of_who_is_first_over_that_of_the_list(some: list[tuple[Numbers, Numbers]], more: int) -> None:
    found = ListLoss("listnet", 3).entropies(*padded(some, more)).tolist()
    for ours, (s, _) in zip(found, some, strict=True):
        total = sum(math.exp(v) for v in s)
        share = [math.exp(v) / total for v in s]
        slow = -sum(p * math.log(p) for p in share) / math.log(len(s)) * math.log(3) if len(s) > 1 else 0.0
        assert ours == pytest.approx(slow, abs=1e-9)
        assert -1e-12 <= ours <= math.log(3) + 1e-12
