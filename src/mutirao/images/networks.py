"""Small networks for pictures; the convolutional ones take 32 x 32 bytes, and normalise them in their first layer."""

import itertools

import torch
from torch import Tensor, nn

CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)  # of the training set, by channel, pixels in 0..1
CIFAR10_STD = (0.2470, 0.2435, 0.2616)


class Normalise(nn.Module):
    """Bytes to numbers: (x / 255 - mean) / deviation by channel, with CIFAR-10's usual figures."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...] = CIFAR10_MEAN, std: tuple[float, ...] = CIFAR10_STD) -> None:
        super().__init__()
        # Not part of the state: constants need not travel, and nobody should average them.
        self.register_buffer("scale", 1 / (255 * torch.tensor(std)).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", -(torch.tensor(mean) / torch.tensor(std)).view(1, -1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch of images."""
        return x.float() * self.scale + self.shift


def convolutional(channels: tuple[int, int], pool: tuple[int, int], *dense: int) -> nn.Module:
    """Two 5 x 5 convolutions, each with a pool behind it, then dense layers of these widths."""
    layers: list[nn.Module] = [Normalise()]
    for into, out in zip((3, *channels), channels, strict=False):
        layers += [nn.Conv2d(into, out, 5), nn.ReLU(), nn.MaxPool2d(*pool)]
    layers.append(nn.Flatten())
    for into, out in itertools.pairwise(dense):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """The network of the federated learning papers: two 5 x 5 convolutions of 64, pools 3/2, dense 1024-384-192-10.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    after TensorFlow's tutorial; 576,778 parameters.
    """
    return convolutional((64, 64), (3, 2), 1024, 384, 192, 10)


def small() -> nn.Module:
    """A network of the size of LeNet-5 (LeCun et al., 1998) for quick trials; 62,006 parameters."""
    return convolutional((6, 16), (2, 2), 400, 120, 84, 10)


def mlp(inputs: int = 64, width: int = 64, outputs: int = 10) -> nn.Module:
    """One hidden layer; as it is, for scikit-learn's digits."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def make_network(name: str, shape: tuple[int, ...], width: int, outputs: int) -> nn.Module:
    """A network for samples of that shape with so many outputs: for vectors dense, or else the one of that name."""
    if len(shape) == 1:
        return mlp(shape[0], width, outputs)
    layers = list(NETWORKS[name]().children())
    return nn.Sequential(*layers[:-1], nn.Linear(layers[-1].in_features, outputs))  # type: ignore[arg-type]


NETWORKS = {"cnn": cnn, "small": small}
