"""Model inputs: a tensor, or a tuple or dict of tensors, row by row; and how a model is called with them."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mutirao.training.lazy_samples import LazyInputs

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
CAST_TO_FLOAT32 = (torch.float64, torch.float16, torch.bfloat16)  # what becomes float32, as models are


KIND_NAMES = {"U": "text", "S": "text", "M": "dates", "m": "times", "c": "complex"}
TEXT_HINT = "the recipe `tabular` reads such columns"
CLASS_HINT = "number the classes of all clients at once, with mutirao.number_classes"


def as_tensor(values: Any, what: str, right: str = TEXT_HINT) -> Tensor:
    """Numbers as a tensor, without a copy where possible; all floating-point types become float32."""
    tensor = values if isinstance(values, Tensor) else to_tensor(values, what, right)
    if tensor.requires_grad:
        tensor = tensor.detach()  # data are not trained
    if tensor.dtype in CAST_TO_FLOAT32:
        return tensor.to(torch.float32)
    return tensor


def to_tensor(values: Any, what: str, right: str) -> Tensor:
    """An array, a column or a list as a tensor; ValueError with one line for anything else."""
    if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
        check_shapes(values, what)
        return torch.stack([v.detach() for v in values])
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{what}: its rows differ in shape; a tensor needs rows of one shape") from None
    if array.dtype.kind == "O":
        array = numbers_of_objects(array, what, right)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{what} is {KIND_NAMES.get(array.dtype.kind, str(array.dtype))}, not numbers; {right}")
    if array.dtype == np.longdouble or array.dtype.byteorder not in "=|<" or min(array.strides, default=0) < 0:
        # torch.from_numpy takes no long doubles, no foreign byte order and no negative strides.
        kind: np.dtype[Any] = array.dtype.newbyteorder("=")
        if array.itemsize > 8:
            kind = np.dtype(np.float32)
        array = np.ascontiguousarray(array, kind)
    if array.dtype.kind == "u" and array.itemsize > 1:
        # torch supports few operations on unsigned integers.
        array = array.astype(np.int64)
    with warnings.catch_warnings():
        # Samples are never written to, so the tensor may share the memory of a read-only array.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if array.ndim:
            return torch.from_numpy(array)
        return torch.tensor(array.item())


def numbers_of_objects(array: np.ndarray[Any, Any], what: str, right: str) -> np.ndarray[Any, Any]:
    """The values of an object array: rows that are arrays, or numbers some of which are missing."""
    flat = array.ravel().tolist()
    if any(isinstance(v, str) for v in flat):
        raise ValueError(f"{what} is text, not numbers; {right}")
    if flat and hasattr(flat[0], "__len__"):
        check_shapes(flat, what)
        return np.stack([np.asarray(v) for v in flat])
    try:
        if all(isinstance(v, bool | int) for v in flat):
            # Classes are int64, whatever type the objects had.
            return array.astype(np.int64)
        return np.array([np.nan if is_missing(v) else float(v) for v in flat]).reshape(array.shape)
    except (TypeError, ValueError):
        kind = next(type(v).__name__ for v in flat if not is_missing(v) and not isinstance(v, int | float))
        raise ValueError(f"{what} holds a {kind}, not numbers; {right}") from None


def is_missing(value: Any) -> bool:
    """Whether a value stands for a missing one: None, or pandas' markers."""
    return type(value).__name__ in ("NoneType", "NAType", "NaTType")


def check_shapes(rows: Any, what: str) -> None:
    """ValueError if rows differ in shape."""
    shapes = {tuple(np.shape(row)) for row in rows}
    if len(shapes) > 1:
        some = " and ".join(str(list(s)) for s in sorted(shapes)[:2])
        raise ValueError(f"{what}: its rows differ in shape, such as {some}; pad or resize them")


def as_labels(values: Any, what: str = "y") -> Tensor:
    """Labels as tensors: integer and boolean classes become int64, numbers float32."""
    y = as_tensor(values, what, CLASS_HINT)
    if y.is_floating_point() or y.dtype is torch.int64:
        return y
    return y.to(torch.int64)


def as_inputs(values: Any) -> "Inputs | LazyInputs":
    """Inputs as a model takes them: a tensor, or a flat tuple or dict of tensors."""
    if isinstance(values, Tensor):
        return as_tensor(values, "x")
    if isinstance(values, LazyInputs):
        return values
    if isinstance(values, dict):
        return {str(name): as_input_tensor(v, f"x[{name!r}]") for name, v in values.items()}
    if isinstance(values, tuple) and any(hasattr(v, "shape") for v in values):  # not rows in a tuple
        return tuple(as_input_tensor(v, f"x[{i}]") for i, v in enumerate(values))
    return as_tensor(values, "x")


def as_input_tensor(values: Any, what: str) -> Tensor:
    """One tensor of several inputs."""
    if isinstance(values, dict | tuple):
        raise ValueError(
            f"{what} is a {type(values).__name__}: inputs are tensors, a tuple or a dict of them, not nested"
        )
    return as_tensor(values, what)


def tensors_in(x: "Inputs | LazyInputs") -> list[Tensor]:
    """The tensors of inputs; for lazy inputs, those of the example batch."""
    if isinstance(x, LazyInputs):
        return tensors_in(x.example)
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return list(x.values())
    return list(x)


def map_tensors(x: Any, how: Callable[[Any], Any]) -> Any:
    """The same structure with a function applied to each tensor."""
    if isinstance(x, dict):
        return {name: how(t) for name, t in x.items()}
    if isinstance(x, tuple):
        return tuple(how(t) for t in x)
    return how(x)


def input_kind(x: "Inputs | LazyInputs") -> Any:
    """Shape and dtype of one sample's inputs; lazy inputs are a kind of their own, as two sets cannot be joined."""
    if isinstance(x, Tensor):
        return x.shape[1:], x.dtype
    if isinstance(x, LazyInputs):
        return "lazy", id(x), input_kind(x.example)
    each = [(t.shape[1:], t.dtype) for t in tensors_in(x)]
    if isinstance(x, dict):
        return tuple(zip(x, each, strict=True))
    return tuple(each)


def call_model(model: nn.Module, x: Any, reads: Callable[..., Any] | None = None) -> Any:
    """The model's outputs for a batch; a tuple or dict is spread over the arguments of `forward` if they match.

    Where it does not fit, the model is given the tuple or dict itself. `reads` is the `forward` to go by, if a wrapper
    hides it.
    """
    if isinstance(x, Tensor):
        return model(x)
    given: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(x, tuple):
        given = x
    else:
        named = {str(k): v for k, v in x.items()}
    # Bound first and called afterwards: a TypeError from inside `forward` must not look like a mismatch.
    try:
        inspect.signature(reads or model.forward).bind(*given, **named)
    except TypeError:
        return model(x)
    if isinstance(x, tuple):
        return model(*x)
    return model(**x)
