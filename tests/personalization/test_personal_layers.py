"""Which arrays are personal."""

import pytest
from torch import nn

from mutirao.errors import ConfigError
from mutirao.personalization import FedBN, FedPer, FedRep, Settings
from mutirao.personalization.handler import batch_norms, freeze_others, last_layer_names, matching_names, personal_names
from mutirao.training.trainer import Trainer

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2), nn.ReLU())


def test_the_last_layer_is_the_last_with_weights_of_its_own() -> None:
    names = list(deep().state_dict())
    assert last_layer_names(deep(), names) == ["4.weight", "4.bias"]
    assert last_layer_names(deep(), names[:7]) == [f"1.{name}" for name in NORM]


def test_layers_by_name_are_arrays_or_whole_layers() -> None:
    names = list(deep().state_dict())
    assert matching_names(names, "4, 3.bias") == ["3.bias", "4.weight", "4.bias"]
    assert matching_names(names, "*.bias") == ["0.bias", "1.bias", "3.bias", "4.bias"]
    with pytest.raises(ConfigError, match=r"personal\.layers: 'head' matches none of the shared arrays: 0\.weight"):
        matching_names(names, "4,head")


def test_batch_normalisation_is_found_with_its_statistics() -> None:
    found = batch_norms(deep(), list(deep().state_dict()))
    assert found == [f"1.{name}" for name in NORM]


def test_one_part_alone_is_trained() -> None:
    module = freeze_others(deep, {"4.weight"})
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["4.weight"]


def frozen_body() -> nn.Module:
    module = deep()
    for part in list(module.children())[:4]:
        part.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (lambda: nn.Linear(2, 2), FedPer(), "personal=fedper: all trained arrays would be personal"),
        (lambda: nn.Linear(2, 2), FedBN(), "personal=fedbn: the model has no trainable batch normalisation"),
        (frozen_body, FedRep(), "personal=fedrep: all trained arrays would be personal"),
        (frozen_body, FedBN(), "personal=fedbn: the model has no trainable batch normalisation"),
        (deep, FedPer(layers="1.running_*"), "personal=fedper: none of 1.running_mean, 1.running_var is trained"),
        (deep, FedPer(layers="*"), "all trained arrays would be personal"),
    ],
)
def test_what_cannot_be_personal_is_refused_by_name(model: object, kind: Settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        personal_names(Trainer(model), kind)  # type: ignore[arg-type]
