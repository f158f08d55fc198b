"""Samples that are read when batches need them: the bits of those at hand, in bounded memory."""

import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.samples import Samples, pool_clients, virtual_clients

X = torch.arange(60, dtype=torch.float32).view(20, 3)
OTHER = torch.arange(20) * 7
ONE = 3 * 4 + 8  # bytes of a sample of both


def both(i: int) -> dict[str, torch.Tensor]:
    return {"x": X[i], "other": OTHER[i]}


@given(st.integers(0, 25), st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=30), min_size=1, max_size=6))
def test_batches_are_those_of_the_whole_whatever_is_kept(kept: int, batches: list[list[int]]) -> None:
    example = {"x": X[:1], "other": OTHER[:1]}
    lazy = LazyInputs(both, 20, example, kept * ONE)
    reads: list[int] = []
    lazy.read = lambda i: (reads.append(i), both(i))[1]
    for rows in batches:
        made = lazy.fetch(np.array(rows))
        assert torch.equal(made["x"], X[rows])
        assert torch.equal(made["other"], OTHER[rows])
    assert sum(t.nbytes for t in lazy._held) <= kept * ONE
    if kept >= 20:
        assert all(reads.count(row) == 1 for row in set().union(*batches) if all(b.count(row) < 2 for b in batches))


def test_threads_that_fetch_at_once_see_whole_samples_and_read_one_at_a_time() -> None:
    inside, most, wrong = [0], [0], []

    def read(i: int) -> torch.Tensor:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(1e-4)  # lets the others in, if they may
        made = torch.full((100,), float(i))
        inside[0] -= 1
        return made

    lazy = LazyInputs(read, 200, torch.zeros(1, 100), 100 * 400)

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(30):
            rows = draw.integers(0, 200, 16)
            if not torch.equal(lazy.fetch(rows), torch.from_numpy(rows)[:, None].float().expand(-1, 100)):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert most == [1]


def test_what_is_kept_while_a_model_is_judged_can_be_trained_on() -> None:
    lazy = LazyInputs(lambda i: X[i], 20, X[:1], 1 << 20)
    with torch.inference_mode():
        lazy.fetch(np.arange(20))
    layer = torch.nn.Linear(3, 1)
    layer(lazy.fetch(np.arange(4))).sum().backward()
    assert layer.weight.grad is not None


def test_clients_share_one_lazy_set() -> None:
    class Items:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> Any:
            return X[i], int(OTHER[i])

    whole = Samples.of(Items(), limit=60)
    assert isinstance(whole.x, LazyInputs)
    clients = virtual_clients(whole.x, whole.y, [np.arange(5), np.arange(5, 20)])
    x, y = Samples.of(clients["c1"]).batch(np.array([1, 0]))
    assert torch.equal(x, X[[6, 5]])
    assert y.tolist() == OTHER[[6, 5]].tolist()
    assert torch.equal(Samples.of(clients["c1"]).first(2).batch(slice(None))[0], X[5:7])
    assert torch.equal(pool_clients(clients)["pooled"].batch(slice(3, 6))[0], X[3:6])  # type: ignore[union-attr]


LARGE = """
import resource, sys
import numpy as np, torch
from torch import nn
from torch.utils.data import Dataset
from mutirao import LocalFleet, Run, Samples, Trainer, train, virtual_clients
from mutirao.aggregation import FedAvg
from mutirao.selection import everyone

SIDE, N = 512, 1200

class Large(Dataset):  # 1.2 GB, a megabyte a sample, made as it is asked for
    def __len__(self):
        return N
    def __getitem__(self, i):
        return torch.full((SIDE, SIDE), i / N), i % 2

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(SIDE, 2)
    def forward(self, x):
        return self.last(x.mean(1))

trainer = Trainer(Model, batch_size=8)
run = Run(trainer.initial(0))
small = Samples(torch.zeros(8, SIDE, SIDE), [0, 1] * 4)
trainer.evaluate(run.arrays, small)  # what torch itself takes for a first step is no part of it
before = peak()
data = Samples.of(Large(), limit=int(sys.argv[1]))
clients = virtual_clients(data.x, data.y, np.array_split(np.random.default_rng(0).permutation(N), 4))
trainer.check(run.arrays, clients)
for done in train(run, LocalFleet(trainer, clients), rounds=2, select=everyone, aggregate=FedAvg()):
    assert done.row["replied"] == 4, done
judged = trainer.evaluate(run.arrays, data)
print(type(data.x).__name__, N * SIDE * SIDE * 4, peak() - before)
"""


def grown(limit: int) -> tuple[str, int, int]:
    done = subprocess.run([sys.executable, "-c", LARGE, str(limit)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kind, total, growth = done.stdout.split()
    return kind, int(total), int(growth)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_a_set_of_more_than_a_gigabyte_trains_under_a_limit_of_one() -> None:
    kind, total, growth = grown(1 << 30)
    assert kind == "LazyInputs"
    assert growth < 1 << 30 < total
