"""The fused engine: small dense networks trained by a kernel in C (`dense.c`), one call a client, clients in threads.

It supports Linear, ReLU and Dropout layers with cross-entropy and SGD (momentum, weight decay, corrections and anchors
included), however the module is written: its forward pass is traced, and verified by its gradients. Whether a model is
supported depends on the model and the shape of a sample only, never on which clients take part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from mutirao.core.arrays import Array, Arrays
from mutirao.core.fleet import ClientId, Reply
from mutirao.randomness import derive_seed
from mutirao.training.adapters import LIMIT
from mutirao.training.engine.compiled_step import is_close
from mutirao.training.engine.dropout import kernel_masks
from mutirao.training.engine.jobs import Job, shared_storage
from mutirao.training.engine.threaded import run_in_threads
from mutirao.training.engine.tracer import Unsupported
from mutirao.training.lazy_samples import LazyInputs
from mutirao.training.measurements import squared_error_extras, training_metrics
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import PlainTrainer
from mutirao.training.pull import NOTHING, LocalHyperparameters, Pull
from mutirao.training.samples import Index, Samples

try:
    from mutirao.training.engine import _dense  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    kernel: Callable[..., tuple[float, int]] | None = None
else:
    kernel = _dense.train

MAX_LAYERS = 32
TOLERANCE = 1e-4
VERIFIED_SAMPLES = 7  # samples of a step that is proven

Share = Callable[[], tuple[Array, Array, Index]]  # numbers, classes, and the rows of them that batches are made of


class DenseLayer(NamedTuple):
    """A dense layer: the names of its arrays, its number of inputs, and the dropout rate of those inputs."""

    weight: str
    bias: str | None
    inputs: int
    dropped: float


def train_fused(trainer: PlainTrainer, jobs: Sequence[Job]) -> dict[ClientId, Reply]:
    """Train clients of one kind, except those with unusable data; raises `Unsupported` if the model does not fit."""
    layers = verified_layers(trainer, tensor_kind(jobs[0].samples))
    shapes = {name: tuple(tensor.shape) for name, tensor in trainer.thread_module().state_dict().items()}
    shares = shares_read_lazily(jobs) if isinstance(jobs[0].samples.x, LazyInputs) else shares_in_memory(jobs)

    def train(share: tuple[Job, Share]) -> Reply | None:
        job, numbers = share
        if {name: array.shape for name, array in job.arrays.items()} != shapes:
            # The kernel itself would accept a network of any widths.
            return None
        try:
            return train_client(layers, job, *numbers())
        except ValueError:  # labels no class has, arrays of another shape: the plain path says what is wrong
            return None

    replies = run_in_threads(trainer.workers, train, shares)
    return {job.client: reply for (job, _), reply in zip(shares, replies, strict=True) if reply is not None}


def shares_in_memory(jobs: Sequence[Job]) -> list[tuple[Job, Share]]:
    """The clients with their rows of one common storage."""
    x, y, rows = shared_storage([job.samples for job in jobs])
    numbers = x.numpy()
    classes = np.ascontiguousarray(y.numpy())

    def share(job: Job, owned: Index) -> tuple[Array, Array, Index]:
        if numbers.flags.c_contiguous:
            return numbers, classes, owned[job.order()]
        return np.ascontiguousarray(numbers[owned]), classes[owned], job.order()

    return [(job, partial(share, job, owned)) for job, owned in zip(jobs, rows, strict=True)]


def shares_read_lazily(jobs: Sequence[Job]) -> list[tuple[Job, Share]]:
    """Clients with samples that are read when they are trained, if they fit in memory one client at a time."""

    def share(job: Job) -> tuple[Array, Array, Index]:
        x, y = job.samples.batch(slice(0, len(job.samples)))
        return np.ascontiguousarray(x.numpy()), np.ascontiguousarray(y.numpy()), job.order()

    return [(job, partial(share, job)) for job in jobs if 4 * job.samples.width * len(job.samples) <= LIMIT]


def train_client(layers: Sequence[DenseLayer], job: Job, x: Array, y: Array, rows: Index) -> Reply:
    """Train one client: copy its arrays, and update them batch by batch."""
    arrays = {name: np.array(array, np.float32, order="C") for name, array in job.arrays.items()}
    squared = np.zeros(len(rows), np.uint8) if "squared_errors" in job.extras else None
    seed = derive_seed(int(job.request.config["seed"]), int(job.request.config["round"]), "torch", job.client)
    loss, right = run_dense_kernel(
        job.trainer, job.hyperparameters, layers, arrays, seed, x, y, rows, job.lengths, squared, pull=job.pull
    )
    extras = {} if squared is None else squared_error_extras(squared, job.lengths)
    return Reply(arrays, extras, training_metrics(loss, right, len(rows)), len(job.samples))


def run_dense_kernel(
    trainer: PlainTrainer,
    hyperparameters: LocalHyperparameters,
    layers: Sequence[DenseLayer],
    arrays: Arrays,
    seed: int,
    *data: Any,
    pull: Pull = NOTHING,
) -> tuple[float, int]:
    """Update `arrays` in place; the summed loss and the number of correct predictions before each step."""
    if kernel is None:
        raise Unsupported("the kernel for dense networks is not installed")
    weights = layer_arrays(layers, arrays)
    *samples, lengths, squared = data
    dropout = kernel_masks([(layer.inputs, layer.dropped) for layer in layers], int(max(lengths)), seed)
    rates = hyperparameters.lr, trainer.momentum, trainer.weight_decay, hyperparameters.mu
    anchors = None
    if pull.anchor and hyperparameters.mu:
        anchors = layer_arrays(layers, arrays | pull.anchor)
    corrections = None
    if pull.correction:
        zeros = {k: np.zeros_like(v) for k, v in arrays.items() if k not in pull.correction}
        corrections = layer_arrays(layers, zeros | pull.correction)
    return kernel(weights, *samples, lengths, *rates, squared, *dropout, anchors, corrections)


def layer_arrays(layers: Sequence[DenseLayer], arrays: Arrays) -> list[Array | None]:
    """Weight and bias of each layer in order, as the kernel takes them."""
    names = [name for layer in layers for name in (layer.weight, layer.bias)]
    return [np.ascontiguousarray(arrays[name]) if name else None for name in names]


def fits_kernel(trainer: PlainTrainer, jobs: Sequence[Job]) -> bool:
    """Whether the kernel can train this model on such samples."""
    try:
        return bool(verified_layers(trainer, tensor_kind(jobs[0].samples)))
    except (Unsupported, ValueError):
        return False


def tensor_kind(samples: Samples) -> tuple[Any, ...]:
    """Shape and dtype of a sample whose input is one tensor, in memory or read when needed."""
    x = samples.x.example if isinstance(samples.x, LazyInputs) else samples.x
    if not isinstance(x, Tensor):
        raise Unsupported(f"its inputs are a {type(x).__name__}, not one tensor")
    return x.shape[1:], x.dtype, samples.y.shape[1:], samples.y.dtype


def verified_layers(trainer: PlainTrainer, kind: tuple[Any, ...]) -> list[DenseLayer]:
    """The dense layers of a trainer's network, verified once per kind of samples."""
    known = trainer._cache.setdefault("dense", {})
    if kind not in known:
        try:
            known[kind] = verify_layers(trainer, dense_layers(trainer), kind)
        except Unsupported as reason:
            known[kind] = str(reason)
    if isinstance(known[kind], str):
        raise Unsupported(known[kind])
    layers: list[DenseLayer] = known[kind]
    return layers


def dense_layers(trainer: PlainTrainer) -> list[DenseLayer]:
    """The network's layers, if all are Linear with ReLU between them and nothing else is trained or stored."""
    if trainer.torch_device().type != "cpu":
        raise Unsupported("the kernel for dense networks is for the CPU")
    if trainer.loss is not functional.cross_entropy or trainer.optimizer != "sgd" or trainer.clip:
        raise Unsupported("it is not trained with cross-entropy and plain SGD")
    module = trainer.state_names.prepare(trainer.thread_module())
    layers = [
        DenseLayer(f"{path}weight", f"{path}bias" if linear.bias is not None else None, linear.in_features, dropped)
        for path, linear, dropped in linear_chain(module)
    ]
    names = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    if not 0 < len(layers) <= MAX_LAYERS or sorted(names) != sorted(module.state_dict()):
        raise Unsupported("it has other layers than Linear, or uses one twice")
    if any(p.dtype is not torch.float32 or not p.requires_grad for p in module.parameters()):
        raise Unsupported("its weights are frozen, or of another type")
    return layers


def linear_chain(module: nn.Module) -> list[tuple[str, nn.Linear, float]]:
    """The Linear layers in order of use, if the forward pass is: flatten, Linear, ReLU, ..., Linear.

    With each comes the share of its inputs that dropout leaves out.
    """
    if isinstance(module, nn.Linear):
        return [("", module, 0.0)]
    try:
        graph = fx.symbolic_trace(module).graph
        parts = dict(module.named_modules())
    except Exception as error:  # a module may do anything when it is looked at
        raise Unsupported(f"its forward pass cannot be traced ({type(error).__name__})") from None
    found: list[tuple[str, nn.Linear, float]] = []
    rectified = True
    dropped = 0.0
    for node in graph.nodes:
        part = parts.get(node.target) if node.op == "call_module" else None
        name = getattr(node.target, "__name__", node.target)
        if type(part) is nn.Linear and rectified:
            found = [*found, (f"{node.target}.", part, dropped)]
            rectified = False
            dropped = 0.0
        elif (type(part) is nn.ReLU or name in ("relu", "relu_")) and found and not rectified:
            rectified = True
        elif (type(part) is nn.Dropout or node.target is functional.dropout) and not dropped:
            dropped = dropout_rate(node, part)
        elif not (
            node.op in ("placeholder", "output")
            or type(part) is nn.Identity
            or (not found and (type(part) is nn.Flatten or name in ("flatten", "view", "reshape")))
            or (not found and name in ("size", "getitem"))
        ):
            raise Unsupported(f"it has operations other than Linear and ReLU ({name})")
    if rectified or dropped:
        raise Unsupported("its last layer is not Linear")
    return found


def dropout_rate(node: fx.Node, part: nn.Module | None) -> float:
    """The rate of a dropout layer; 0 where it does nothing."""
    given: dict[str, Any] = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    if isinstance(part, nn.Dropout):
        given = vars(part)
    share = given.get("p", 0.5)
    training = given.get("training", True)
    if not isinstance(share, int | float) or not isinstance(training, bool):
        raise Unsupported("its dropout rate is not a number")
    if training:
        return float(share)
    return 0.0


def verify_layers(trainer: PlainTrainer, layers: list[DenseLayer], kind: tuple[Any, ...]) -> list[DenseLayer]:
    """The same layers, if a step of the kernel equals a step of the module on random weights and samples."""
    shape, dtype, label_shape, label_dtype = kind
    if dtype is not torch.float32 or label_dtype is not torch.int64 or label_shape:
        raise Unsupported("its samples are not float32 vectors with one class each")
    rows = np.arange(VERIFIED_SAMPLES)
    lengths = np.array([VERIFIED_SAMPLES])
    far = LocalHyperparameters(
        lr=1.0, epochs=1, steps=0, batch_size=VERIFIED_SAMPLES, mu=0.0
    )  # a step as long as its gradient: little rounding
    shapes = {name: tuple(t.shape) for name, t in trainer.thread_module().state_dict().items()}
    # With lr = 1 and one step, the change of the weights is the negative gradient.
    for draw in range(2):
        rng = np.random.default_rng(draw)
        arrays = {n: rng.normal(0, 1 / np.sqrt(s[-1]), s).astype(np.float32) for n, s in shapes.items()}
        x = rng.normal(size=(VERIFIED_SAMPLES, *shape)).astype(np.float32)
        y = rng.integers(0, shapes[layers[-1].weight][0], VERIFIED_SAMPLES)
        with one_thread(), seeded(draw):
            named = dict(trainer.state_names.prepare(trainer.fill(arrays)).named_parameters())
            try:
                loss = functional.cross_entropy(trainer.thread_module()(torch.tensor(x)), torch.from_numpy(y))
                slopes = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            except Exception as error:  # such samples raise an error when they are trained on
                raise ValueError(f"the model cannot be trained on such samples ({type(error).__name__})") from None
        if any(slope is None for slope in slopes):
            raise Unsupported("some of its layers are not used")
        before = [p.detach().clone() for p in named.values()]
        wanted = [-(g + trainer.weight_decay * p) for p, g in zip(before, slopes, strict=True)]
        total, _ = run_dense_kernel(trainer, far, layers, arrays, draw, x, y, rows, lengths, None)
        moved = [torch.from_numpy(arrays[n]) - p for n, p in zip(named, before, strict=True)]
        mean = loss.item()
        if not is_close(moved, wanted, TOLERANCE) or abs(total / VERIFIED_SAMPLES - mean) > TOLERANCE * (1 + abs(mean)):
            raise Unsupported("its gradients differ")
    return layers
