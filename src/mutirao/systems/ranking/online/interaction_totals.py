"""What learning has cost the users so far: figures of a run by interactions, kept in its memory."""

import numpy as np

from mutirao.core.rounds import Round, Run

TALLY = "online.tally"  # where they lie: interactions, nDCG discounted, regret


def add_up(run: Run, done: Round, interactions: int, discount: float) -> None:
    """Add a round to the sums, and their values to its row.

    `interactions` are all so far, each client that replied having had so many. `online_ndcg` is the sum over rounds t
    of discount^(t - 1) times the mean nDCG of the rankings shown, as FPDGD's authors have it (Hofmann et al., 2013, do
    so by interaction); `regret` the sum over interactions of 1 - nDCG, where there was something to find. The two are
    left out if clients may not tell what they saw.
    """
    total, seen, regret = run.memory.get(TALLY, np.zeros(3))
    now = interactions * sum(int(row["replied"]) for row in done.clients)
    figures = {"interactions": total + now}
    if "train_shown_ndcg" in done.row:
        seen += discount ** (run.round - 1) * float(done.row["train_shown_ndcg"])
        regret += now * float(done.row["train_shown_loss"])
        figures |= {"online_ndcg": seen, "regret": regret}
    run.memory = {**run.memory, TALLY: np.array([total + now, seen, regret])}
    done.row.update({name: float(value) for name, value in figures.items()})
