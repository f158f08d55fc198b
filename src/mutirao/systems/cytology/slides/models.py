"""Save and load a trained model, backbone and head, as one file: safetensors, .pt for torch, or ONNX.

The file also describes the input images and the classes.
"""

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from mutirao.config import one_line
from mutirao.core.arrays import Arrays
from mutirao.datasets.tile_folders import TileScale
from mutirao.errors import ConfigError, Damaged
from mutirao.io import load_arrays, save_arrays, write_whole
from mutirao.research_notice import NOTICE
from mutirao.systems.cytology.slides.readers import Pixels
from mutirao.systems.images.backbones import BACKBONES, SIZE, Backbone, load_backbone
from mutirao.systems.images.choices import FILE, TIMM, Trainable
from mutirao.systems.images.features import normalize_stain
from mutirao.systems.images.heads import FullNetwork, MeanPool, WholeSlide, make_head
from mutirao.systems.images.metrics import abnormal_classes
from mutirao.systems.images.timm_backbones import timm_backbone
from mutirao.training.optimizers import one_thread

ENDINGS = (".safetensors", ".pt", ".onnx")
KIND = "mutirao cytology model"


@dataclass(frozen=True)
class ScreeningModel:
    """A network from images to class probabilities, and its metadata."""

    network: FullNetwork | WholeSlide
    facts: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the outputs."""
        return tuple(self.facts["classes"])

    @property
    def abnormal(self) -> npt.NDArray[np.bool_]:
        """Which classes are abnormal."""
        return np.array([c in self.facts["abnormal"] for c in self.classes])

    @property
    def side(self) -> int:
        """Pixels a side to which tiles are resized; older files do not say it."""
        return int(self.facts.get("side", SIZE))

    @property
    def head(self) -> str:
        """The head: `linear` classifies a tile, the others a whole slide."""
        return str(self.facts.get("head", "linear"))

    def __call__(self, tile: Pixels) -> npt.NDArray[np.float64]:
        """The class probabilities of one tile; a head for slides takes the tile as the whole slide."""
        if isinstance(self.network, WholeSlide):
            return self.classify_slide(self.features(tile)[None])[0]
        with one_thread(), torch.inference_mode():
            found: npt.NDArray[np.float64] = self.network(self.prepare(tile))[0].double().numpy()
        return found

    def prepare(self, tile: Pixels) -> Tensor:
        """One tile as the network's input, prepared as the images were in training."""
        small = normalize_stain(Image.fromarray(tile), self.facts.get("stain", "none"), self.side)
        return torch.from_numpy(np.asarray(small).transpose(2, 0, 1)[None].copy())

    def features(self, tile: Pixels) -> npt.NDArray[np.float32]:
        """The backbone's features of one tile."""
        with one_thread(), torch.inference_mode():
            found: npt.NDArray[np.float32] = self.network.frozen(self.prepare(tile))[0].numpy()
        return found

    def classify_slide(self, tiles: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """A slide's class probabilities from the features of its tiles, and each tile's attention."""
        assert isinstance(self.network, WholeSlide)
        with one_thread(), torch.inference_mode():
            found, attention = self.network.classify_features(torch.from_numpy(tiles))
        return found[0].double().numpy(), attention.double().numpy()


def assemble(config: Any, classes: Sequence[str], arrays: Arrays, scale: TileScale | None = None) -> ScreeningModel:
    """Build the model of a cytology run from its configuration and the trained `arrays`."""
    frozen = load_backbone(config.body, config.weights)
    part = make_head(config.head, frozen, config.trainable, len(classes))
    part.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in arrays.items()})
    abnormal = abnormal_classes(classes, config.normal)
    facts: dict[str, Any] = {
        "kind": KIND,
        "notice": NOTICE,
        "body": config.body,
        "trainable": config.trainable,
        "head": config.head,
        "stain": config.stain,  # normalization that the input images need
        "classes": list(classes),
        "abnormal": [c for c, a in zip(classes, abnormal, strict=True) if a],
        "input": f"bytes, RGB, N x 3 x {frozen.size} x {frozen.size}",
        "side": frozen.size,
        # The scale of the training images, if it is known.
        "tile": None,
        "mpp": None,
    }
    if scale:
        facts |= {"tile": scale.size, "mpp": scale.mpp}
    return ScreeningModel(join_parts(frozen, part, config.trainable), facts)


def join_parts(frozen: Any, part: nn.Module, trainable: Trainable) -> FullNetwork | WholeSlide:
    """Backbone and trained part as one network, for inference only."""
    if isinstance(part, MeanPool):
        return WholeSlide(frozen, part).eval().requires_grad_(False)
    return FullNetwork(frozen, part, trainable).eval().requires_grad_(False)


def all_tensors(network: nn.Module) -> dict[str, Tensor]:
    """All weights and statistics of a network, including those that are never sent."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def save_model(model: ScreeningModel, path: Path) -> None:
    """Write the model as safetensors, .pt or ONNX, by the suffix of the path."""
    if str(model.facts["body"]).startswith(FILE):
        raise ConfigError(
            f"{path}: the backbone is an exported file and cannot be written into another; screen with the run folder"
        )
    if path.suffix == ".safetensors":
        save_arrays(
            path, {k: v.detach().contiguous().numpy() for k, v in all_tensors(model.network).items()}, model.facts
        )
    elif path.suffix == ".pt":
        out = io.BytesIO()
        tensors = {k: v.detach().contiguous().clone() for k, v in all_tensors(model.network).items()}
        torch.save({"state_dict": tensors, "facts": json.loads(json.dumps(dict(model.facts)))}, out)
        write_whole(path, out.getvalue())
    elif path.suffix == ".onnx":
        write_whole(path, onnx_of(model))
    else:
        raise ConfigError(f"{path}: a model's name ends in {', '.join(ENDINGS)}")


def load_model(path: Path) -> ScreeningModel:
    """Read a model that `save_model` wrote."""
    if path.suffix not in (".safetensors", ".pt"):
        raise ConfigError(f"{path} is neither a run folder nor a model (.safetensors or .pt)")
    arrays, facts = load_arrays(path) if path.suffix == ".safetensors" else load_torch(path)
    if facts.get("kind") != KIND or not is_known(facts.get("body")) or not facts.get("classes"):
        raise Damaged(f"{path} is no model of the cytology recipe")
    frozen = backbone_without_weights(facts["body"])
    part = make_head(facts.get("head", "linear"), frozen, facts["trainable"], len(facts["classes"]))
    network = join_parts(frozen, part, facts["trainable"])
    own = all_tensors(network)
    if own.keys() != arrays.keys() or any(own[k].shape != arrays[k].shape for k in own):
        raise Damaged(f"{path} does not hold the weights of {facts['body']}")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(torch.from_numpy(np.array(arrays[key])))
    return ScreeningModel(network, facts)


def load_torch(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and metadata of a .pt file, read without running code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        arrays = {str(k): v.numpy() for k, v in found["state_dict"].items()}
        facts = {str(k): v for k, v in found["facts"].items()}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # a broken file can raise almost any exception
        raise Damaged(f"{path} holds no model that can be read safely: {one_line(error)[:150]}") from error
    return arrays, facts


def is_known(name: Any) -> bool:
    """Whether a backbone of that name can be built without an exported file."""
    return isinstance(name, str) and (name in BACKBONES or name.startswith(TIMM))


def backbone_without_weights(name: str) -> Backbone:
    """The backbone of that name with any weights, which the model's own then replace."""
    if name.startswith(TIMM):
        return timm_backbone(name, pretrained=False)
    build, _ = BACKBONES[name]
    return build()


def onnx_of(model: ScreeningModel) -> bytes:
    """The network in ONNX: `pictures` (bytes, N x 3 x side x side) to `probabilities`.

    With a head for slides the input is the tiles of one slide, and `attention` is an output, too.
    """
    try:
        import onnx
    except ImportError as error:
        raise ConfigError("ONNX needs a package: install mutirao[onnx]") from error
    slide = isinstance(model.network, WholeSlide)
    results = ["probabilities"]
    batch = 1
    if slide:
        results.append("attention")
        batch = 2
    out = io.BytesIO()
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")  # the exporter without further dependencies is deprecated
        torch.onnx.export(
            model.network,
            (torch.zeros((batch, 3, model.side, model.side), dtype=torch.uint8),),
            out,  # type: ignore[arg-type]  # the old exporter accepts a stream, too
            input_names=["pictures"],
            output_names=results,
            dynamic_axes={"pictures": {0: "N"}, results[-1]: {0: "N"}},
            opset_version=17,
            dynamo=False,
        )
    made = onnx.load_model_from_string(out.getvalue())
    onnx.helper.set_model_props(made, {k: v if isinstance(v, str) else json.dumps(v) for k, v in model.facts.items()})
    onnx.checker.check_model(made)
    content: bytes = made.SerializeToString()
    return content
