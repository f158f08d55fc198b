"""A model and its data, as in Flower's quickstart for PyTorch: scikit-learn's digits, dealt in turn."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HELD_BACK = 297  # of 1797 pictures: the server's own


class Net(nn.Module):
    """A small network for pictures of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the ten digits."""
        return self.out(torch.relu(self.hidden(x)))


def load_data(partition_id: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """What one partition trains on, and what it judges by."""
    x, y = digits()
    x, y = x[HELD_BACK + partition_id :: num_partitions], y[HELD_BACK + partition_id :: num_partitions]
    kept = len(y) // 5
    draw = torch.Generator().manual_seed(partition_id)
    train = DataLoader(TensorDataset(x[kept:], y[kept:]), batch_size=32, shuffle=True, generator=draw)
    return train, DataLoader(TensorDataset(x[:kept], y[:kept]), batch_size=32)


def load_centralized_data() -> DataLoader:
    """The server's own pictures."""
    x, y = digits()
    return DataLoader(TensorDataset(x[:HELD_BACK], y[:HELD_BACK]), batch_size=99)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All pictures and their digits."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train; the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    loss, right, seen = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            scores = net(x)
            loss += nn.functional.cross_entropy(scores, y, reduction="sum").item()
            right += int((scores.argmax(1) == y).sum())
            seen += len(y)
    return loss / seen, right / seen
