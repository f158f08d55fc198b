"""Bodies in a file of their own, as they were exported: TorchScript, or ONNX. They stay as they are.

The file is known by its digest. What a picture must look like it may say itself, as JSON with `mean`, `std`, `size` and
`bytes` (the network takes bytes and normalises by itself): an extra file `preprocessing.json` of a TorchScript archive,
or the property `preprocessing` of an ONNX model. What it does not say is ImageNet's.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mutirao.config import one_line
from mutirao.errors import ConfigError
from mutirao.systems.images.base import IMAGENET_MEAN, IMAGENET_STD, SIZE, Body, Features
from mutirao.systems.images.choices import FILE
from mutirao.systems.images.networks import Normalise

NOTE = "preprocessing"
Call = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Preprocessing:
    """What a picture is made into before the network sees it."""

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    size: int = SIZE
    bytes: bool = False

    @classmethod
    def read(cls, text: str, **known: Any) -> "Preprocessing":
        """What a file says; ValueError if that is nothing of the kind."""
        told = json.loads(text) if text else {}
        if not isinstance(told, dict) or not told.keys() <= cls.__dataclass_fields__.keys():
            raise ValueError(f"its {NOTE} must be of mean, std, size and bytes, not {text[:80]}")
        for name in ("mean", "std"):
            if name in told:
                told[name] = tuple(float(v) for v in told[name])
        made = cls(**told | known)
        if (
            len(made.mean) != 3
            or len(made.std) != 3
            or min(made.std) <= 0
            or not np.isfinite([*made.mean, *made.std]).all()
        ):
            raise ValueError(f"its {NOTE} needs a mean and a deviation above 0 for each of three colours")
        if type(made.size) is not int or not 16 <= made.size <= 4096 or type(made.bytes) is not bool:
            raise ValueError(f"its {NOTE} needs a size from 16 to 4096 pixels, and bytes true or false")
        return made


class Outside(nn.Module):
    """A network that is not made of modules of ours: it is called, has no weights to train, and is never copied."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        """What the network gives."""
        return self.call(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Outside":
        return self


def file_body(name: str, weights: str = "") -> Body:
    """The body that `file:PATH` names."""
    path = Path(name.removeprefix(FILE)).expanduser()
    if weights:
        raise ConfigError(f"weights: body={name} has its own; leave them out")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the body {path}: {error.strerror or error}") from error
    try:
        call, how = (open_onnx if path.suffix.lower() == ".onnx" else open_script)(content)
    except ConfigError:
        raise
    except Exception as error:  # torch and onnxruntime each have their own kinds for what they cannot read
        kind = "ONNX" if path.suffix.lower() == ".onnx" else "TorchScript (a file of weights is no network)"
        raise ConfigError(f"{path} cannot be used as a body in {kind}: {one_line(error)[:150]}") from error
    first = nn.Identity() if how.bytes else Normalise(how.mean, how.std)
    trunk = nn.Sequential(first, Outside(call), Features(name)).requires_grad_(False).eval()
    try:
        with torch.inference_mode():
            width = int(trunk(torch.zeros((1, 3, how.size, how.size), dtype=torch.uint8)).shape[1])
    except ConfigError:
        raise
    except Exception as error:
        text = one_line(error)[:150]
        raise ConfigError(
            f"{path} takes no picture of 3 x {how.size} x {how.size}: {text}; see docs/bodies.md"
        ) from error
    return Body(name, trunk, nn.Sequential(), width, how.size, f"{hashlib.sha256(content).hexdigest()} {how}")


def open_script(content: bytes) -> tuple[Call, Preprocessing]:
    """A TorchScript archive; its code is run by torch's own interpreter, so it must be trusted like a program."""
    more = {f"{NOTE}.json": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # others' files are in it all the same
        network = torch.jit.load(io.BytesIO(content), map_location="cpu", _extra_files=more).eval()  # type: ignore[no-untyped-call]
    text = more[f"{NOTE}.json"]

    def call(x: Tensor) -> Any:
        # Unoptimised: a graph that is specialised in its first runs gives other bits in the first than in the others.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return network(x)

    return call, Preprocessing.read(text.decode() if isinstance(text, bytes) else text)


def open_onnx(content: bytes) -> tuple[Call, Preprocessing]:
    """An ONNX model, by onnxruntime on one core; it holds arithmetic alone, and all its weights."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ConfigError("a body in ONNX needs packages: install mutirao[onnx]") from error
    graph = onnx.load_model_from_string(content).graph
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in graph.initializer):
        raise ValueError("its weights lie in another file; save it with all its weights in one")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # pictures are looked at one a core
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].shape[1] != 3:
        raise ValueError(f"it takes {[i.shape for i in inputs]}; right is one input of N x 3 x height x width")
    if inputs[0].type not in ("tensor(float)", "tensor(uint8)"):
        raise ValueError(f"it takes {inputs[0].type}; right is float or uint8")
    known: dict[str, Any] = {"bytes": inputs[0].type == "tensor(uint8)"}
    if isinstance(side := inputs[0].shape[2], int):
        known["size"] = side
    how = Preprocessing.read(session.get_modelmeta().custom_metadata_map.get(NOTE, ""), **known)
    single, name, out = inputs[0].shape[0] == 1, inputs[0].name, session.get_outputs()[0].name

    def call(x: Tensor) -> Tensor:
        batches = x.numpy()[:, None] if single else [x.numpy()]
        return torch.from_numpy(np.concatenate([session.run([out], {name: batch})[0] for batch in batches]))

    return call, how
