"""What a step is said to cost is what its products are, by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mutirao.core.fleet import Request, Site
from mutirao.training.engine.dispatch import HEAVY_CALL, count_calls, is_busy
from mutirao.training.engine.jobs import Job, plan_jobs
from mutirao.training.trainer import Trainer

BATCH = 8


class Reader(nn.Module):
    """Two LSTM layers and the last step's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, 2, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 4, 3))[0][:, -1])


def job_of(trainer: Trainer, inputs: Any = None) -> Job:
    inputs = np.zeros((3, 12), np.float32) if inputs is None else inputs
    site = Site("ana", (inputs, np.zeros(3, np.int64)))
    [job], _ = plan_jobs(trainer, {"ana": Request("train", trainer.initial(0), {"seed": 0, "round": 1})}, {"ana": site})
    return job


@pytest.mark.parametrize(
    ("model", "flops"),
    [
        (lambda: nn.Linear(12, 7), 2 * BATCH * 12 * 7),
        (lambda: nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 2)), 2 * BATCH * (12 * 7 + 7 * 2)),
        (
            lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.Flatten()),
            2 * BATCH * 12 * 9 * 6,
        ),
        (Reader, 2 * BATCH * (4 * (20 * 8 + 20 * 10) + 5 * 2)),
    ],
)
def test_operations_are_counted(model: Any, flops: int) -> None:
    trainer = Trainer(model, batch_size=BATCH)
    state = torch.get_rng_state()
    assert count_calls(trainer, job_of(trainer))[0] == flops
    assert torch.equal(state, torch.get_rng_state())


def test_weights_that_are_used_for_every_token_count_each_time() -> None:
    """A transformer's step is heavier than its weights and samples would tell."""
    shared = Trainer(lambda: nn.Sequential(nn.Unflatten(1, (4, 3)), nn.Linear(3, 3), nn.Flatten()), batch_size=BATCH)
    assert count_calls(shared, job_of(shared))[0] == 2 * BATCH * 4 * 9


def test_the_rule_knows_the_batch_of_the_request_and_not_how_many_samples_a_client_has() -> None:
    outputs = HEAVY_CALL // (2 * 12 * BATCH) + 1
    for batch, busy in ((BATCH, True), (BATCH - 1, False)):
        trainer = Trainer(lambda: nn.Linear(12, outputs, bias=False), batch_size=batch)
        assert is_busy(trainer, job_of(trainer)) is busy


def test_samples_that_the_model_cannot_take_cost_nothing_here() -> None:
    trainer = Trainer(lambda: nn.Linear(12, 2))
    assert count_calls(trainer, job_of(trainer, np.zeros((3, 5), np.float32)))[0] == 0
