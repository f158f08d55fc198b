"""The models of the jobs, as somebody without this project at hand would write them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def small_dense(inputs: int, classes: int) -> nn.Module:
    """One hidden layer of 64."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, classes))


def wide_dense(inputs: int, classes: int) -> nn.Module:
    """Two wide hidden layers, with dropout behind the first."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, 512),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, classes),
    )


def convolutional(classes: int) -> nn.Module:
    """The network of FedAvg's authors for CIFAR-10."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(3136, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def femnist(classes: int) -> nn.Module:
    """The network that FEMNIST is trained with as a rule."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


class Transformer(nn.Module):
    """Tokens of some features, learned positions, two encoder layers, and the mean of what comes out."""

    def __init__(self, tokens: int, features: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.encoder(self.embed(x) + self.positions).mean(1))
        return scores


class Recurrent(nn.Module):
    """Two LSTM layers of 100; what the last step gives is judged."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, 100, 2, batch_first=True)
        self.head = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Residual(nn.Module):
    """Two convolutions of 3 x 3 and a way past them."""

    def __init__(self, ins: int, outs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, stride, 1, bias=False),
            norm(outs),
            nn.ReLU(),
            nn.Conv2d(outs, outs, 3, 1, 1, bias=False),
            norm(outs),
        )
        past = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), norm(outs))
        self.past = nn.Identity() if ins == outs else past

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways, rectified."""
        return torch.relu(self.body(x) + self.past(x))


def resnet14(classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Three stages of two blocks with 16, 32 and 64 channels."""
    stages = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        norm(16),
        nn.ReLU(),
        *(Residual(*stage, norm) for stage in stages),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": lambda shape, classes: small_dense(shape[0], classes),
    "wide": lambda shape, classes: wide_dense(shape[0], classes),
    "cnn": lambda shape, classes: convolutional(classes),
    "femnist": lambda shape, classes: femnist(classes),
    "transformer": lambda shape, classes: Transformer(*shape, classes),
    "lstm": lambda shape, classes: Recurrent(shape[1], classes),
    "resnet-batch": lambda shape, classes: resnet14(classes, nn.BatchNorm2d),
    "resnet-group": lambda shape, classes: resnet14(classes, lambda channels: nn.GroupNorm(8, channels)),
}
