"""Listwise and pairwise losses of scorers: one value for each list of documents, of any length.

Scores and grades are arrays of `lists x longest`, padded with the grade `PAD`, which does not change the loss. The mean
over lists is minimised. A list of documents with the same grade has loss 0 (but for ListNet). Pairs are computed from
the better document, which has a grade above 0: in long lists with few relevant documents this skips nearly all pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mutirao.training.measurements import CustomLoss

PAD = -1.0  # the grade of a padded place of a list
LEAST = -1e9  # the score of such a place, wherever scores are compared
SHARPNESS = 10.0  # alpha of ApproxNDCG: how sharply a difference of scores decides the order


def listnet(scores: Tensor, grades: Tensor) -> Tensor:
    """Cross-entropy of the top-one probabilities: -sum_i softmax(y)_i log softmax(s)_i (Cao et al., 2007).

    The better document first costs less than the better one last:

    >>> grades = torch.tensor([[2.0, 0.0]])
    >>> [round(float(listnet(torch.tensor([s]), grades)), 2) for s in ([1.0, -1.0], [-1.0, 1.0])]
    [0.37, 1.89]
    """
    there = grades > PAD
    logs = functional.log_softmax(scores.masked_fill(~there, LEAST), -1)
    target = functional.softmax(grades.masked_fill(~there, LEAST), -1)
    return -(target * logs.masked_fill(~there, 0.0)).sum(-1)


def ranknet(scores: Tensor, grades: Tensor) -> Tensor:
    """sum over pairs y_i > y_j of log(1 + exp(s_j - s_i)), over their number (Burges et al., 2005).

    >>> grades = torch.tensor([[2.0, 0.0]])
    >>> [round(float(ranknet(torch.tensor([s]), grades)), 2) for s in ([1.0, -1.0], [-1.0, 1.0])]
    [0.13, 2.13]
    """
    pairs = relevant_pairs(scores, grades)
    cost = torch.where(pairs.worse, functional.softplus(pairs.apart), 0.0).sum(-1)
    return pairs.by_list(cost) / pairs.by_list(pairs.worse.sum(-1).to(cost.dtype)).clamp(min=1)


def lambdarank(scores: Tensor, grades: Tensor) -> Tensor:
    """sum over pairs y_i > y_j of |change of nDCG if they swap places| log(1 + exp(s_j - s_i)) (Burges, 2010).

    A wrong order at the top costs more than one further down:

    >>> grades, right = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), [4.0, 3.0, 2.0, 1.0]
    >>> wrong_top, wrong_end = [3.0, 4.0, 2.0, 1.0], [4.0, 3.0, 1.0, 2.0]
    >>> [round(float(lambdarank(torch.tensor([s]), grades)), 3) for s in (right, wrong_end, wrong_top)]
    [0.13, 0.142, 0.276]
    """
    pairs = relevant_pairs(scores, grades)
    gains = gains_of(grades)
    # The discount depends on ranks, which have no gradient; only the pairs' differences of scores do.
    order = scores.detach().masked_fill(grades <= PAD, LEAST).argsort(-1, descending=True)
    discount = 1 / torch.log2(order.argsort(-1).to(scores.dtype) + 2)
    swap = pairs.differences(gains) * pairs.differences(discount)
    cost = torch.where(pairs.worse, functional.softplus(pairs.apart) * swap.abs(), 0.0)
    return pairs.by_list(cost.sum(-1)) / ideal_of(gains)


def approxndcg(scores: Tensor, grades: Tensor) -> Tensor:
    """1 - 1/IDCG sum_i (2^y_i - 1) / log2(1 + r_i), r_i = 1 + sum_{j != i} 1 / (1 + exp(alpha (s_i - s_j))).

    The rank r_i is smooth, and so nDCG itself has a gradient (Qin, Liu and Li, 2010); alpha is 10.

    >>> grades = torch.tensor([[2.0, 0.0]])
    >>> [round(float(approxndcg(torch.tensor([s]), grades)), 2) for s in ([1.0, -1.0], [-1.0, 1.0])]
    [0.0, 0.37]
    """
    pairs = relevant_pairs(scores, grades)
    gains = gains_of(grades)
    above = torch.where(pairs.others, torch.sigmoid(SHARPNESS * pairs.apart), 0.0).sum(-1)
    # 1 + above is the smooth rank, so 2 + above is under the logarithm.
    found = pairs.by_list(gains[pairs.list, pairs.place] / torch.log2(2 + above))
    return torch.where(gains.sum(-1) > 0, 1 - found / ideal_of(gains), 0.0)


class RelevantPairs(NamedTuple):
    """Pairs of documents: a row for each relevant document i (grade above 0), a column for each place j of its list."""

    list: Tensor  # the list of i
    place: Tensor  # and its place there
    apart: Tensor  # s_j - s_i
    others: Tensor  # whether j is another document
    worse: Tensor  # whether j has a lower grade
    lists: int  # number of lists

    def differences(self, values: Tensor) -> Tensor:
        """v_j - v_i."""
        return values[self.list] - values[self.list, self.place][:, None]

    def by_list(self, values: Tensor) -> Tensor:
        """The sum over the documents i of each list."""
        return values.new_zeros(self.lists).index_add(0, self.list, values)


def relevant_pairs(scores: Tensor, grades: Tensor) -> RelevantPairs:
    """The pairs of each relevant document with the documents of its list."""
    which, place = torch.nonzero(grades > 0, as_tuple=True)
    theirs = grades[which]
    others = (theirs > PAD) & (torch.arange(grades.shape[1], device=grades.device) != place[:, None])
    worse = others & (theirs < grades[which, place][:, None])
    return RelevantPairs(which, place, scores[which] - scores[which, place][:, None], others, worse, len(grades))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "listnet": listnet,
    "ranknet": ranknet,
    "lambdarank": lambdarank,
    "approxndcg": approxndcg,
}


@dataclass(frozen=True)
class ListLoss(CustomLoss):
    """A loss by its name, for grades from 0 to `grades` - 1, with the errors and entropies that selectors use."""

    name: str
    grades: int

    def each(self, scores: Tensor, grades: Tensor) -> Tensor:
        """The loss of each list."""
        return LOSSES[self.name](scores, grades)

    def errors(self, scores: Tensor, grades: Tensor) -> Tensor:
        """(g_i - y_i)^2 of each document, where g_i is the grade of its place in the ideal ranking.

        By falling score the documents of a list get its own grades from the highest to the lowest. So a list in the
        right order has no error, and an error has the unit and the bound of a classifier's: (grades - 1)^2.
        """
        there = grades > PAD
        order = scores.masked_fill(~there, LEAST).argsort(dim=-1, descending=True, stable=True)
        ideal = grades.sort(-1, descending=True).values  # what is padded comes last in both
        given = torch.empty_like(grades).scatter_(-1, order, ideal)
        return torch.where(there, (given - grades).square(), -1.0)

    def entropies(self, scores: Tensor, grades: Tensor) -> Tensor:
        """ln(grades) H(softmax(s)) / ln(n) of each list of n documents: the uncertainty of which one is first.

        From 0 (certain, or a single document) to ln(grades) (all equally likely), as the entropy of a classifier.
        """
        there = grades > PAD
        logs = functional.log_softmax(scores.masked_fill(~there, LEAST), -1)
        entropy = -(logs.exp() * logs.masked_fill(~there, 0.0)).sum(-1)
        many = there.sum(-1)
        return math.log(self.grades) * entropy / torch.log(many.clamp(min=2).to(scores.dtype)) * (many > 1)


def gains_of(grades: Tensor) -> Tensor:
    """2^y - 1, and 0 where there is no document."""
    return torch.exp2(grades.clamp(min=0.0)) - 1


def ideal_of(gains: Tensor) -> Tensor:
    """The largest DCG that a list can have; tiny instead of 0 where no document is relevant, as it is a divisor."""
    places = torch.arange(gains.shape[-1], dtype=gains.dtype, device=gains.device)
    return (gains.sort(-1, descending=True).values / torch.log2(places + 2)).sum(-1).clamp(min=1e-9)
