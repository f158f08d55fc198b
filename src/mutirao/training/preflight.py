"""Checks before the first round: all clients' data, and one batch through the model, the loss and the backward pass.

An error is one line that names the first affected client, what was found, and what would be right. Data that are not in
memory are not all read: of generated or lazily loaded data only the first client's, of lazy samples a few batches.
"""

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from mutirao.core.arrays import Arrays
from mutirao.core.exclusion import PopulationWithout
from mutirao.core.fleet import ClientId
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.training.inputs import call_model, map_tensors, tensors_in
from mutirao.training.lazy_samples import LazyInputs, describe_tensor
from mutirao.training.measurements import is_classes
from mutirao.training.optimizers import one_thread, seeded
from mutirao.training.plain import PlainTrainer
from mutirao.training.samples import ClientData, Index, Samples, VirtualClients, named_inputs

log = logging.getLogger("mutirao")

Fault = tuple[ClientId, str]


@dataclass(frozen=True, eq=False)
class SampleStore:
    """Samples in one storage and their owners: names[i] owns the rows order[offsets[i]:offsets[i + 1]]."""

    x: Any
    y: Tensor
    names: Sequence[ClientId]  # sorted
    order: Index
    offsets: npt.NDArray[np.int64]
    without: Collection[ClientId] = ()
    test: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape and dtype of a sample."""
        return Samples(self.x, self.y).kind

    def samples_of(self, i: int) -> Samples:
        """The samples of the i-th client in this store."""
        return Samples(self.x, self.y, self.order[self.offsets[i] : self.offsets[i + 1]])

    def clients(self) -> Iterator[int]:
        """The indices of clients that own samples here, in sorted order."""
        here = np.flatnonzero(np.diff(self.offsets))
        return (i for i in here.tolist() if self.names[i] not in self.without)

    def owner(self, wrong: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        """The first client that owns one of these rows, and the position among its samples."""
        if not wrong.any():
            return None
        at = np.flatnonzero(wrong[self.order])
        owners = np.searchsorted(self.offsets, at, "right") - 1
        for i, place in zip(owners.tolist(), at.tolist(), strict=True):
            if self.names[i] not in self.without:
                return i, place - int(self.offsets[i])
        return None

    def fault(self, i: int, words: str) -> Fault:
        """A fault of the i-th client's data."""
        if self.test:
            words = f"in its test data {words}"
        return self.names[i], f"client {self.names[i]}: {words}"


def stores_of(population: Mapping[ClientId, Any], without: Collection[ClientId] = ()) -> list[SampleStore]:
    """The stores of all clients' samples, each storage once; of data not in memory only the first client's."""
    if isinstance(population, PopulationWithout):
        return stores_of(population.population, population.names)
    if isinstance(population, VirtualClients):
        found = [
            SampleStore(population.x, population.y, population.names, population.order, population.offsets, without)
        ]
        if (test := population.test) is not None:
            offsets = np.cumsum([0, *map(len, population.tests)])
            rows = np.concatenate([*population.tests, np.empty(0, np.intp)]).astype(np.intp)
            found.append(SampleStore(test.x, test.y, population.names, rows, offsets, without, test=True))
        return found
    names = sorted(name for name in population if name not in without)
    if not isinstance(population, dict):
        try:
            population = {name: population[name] for name in names[:1]}
        except Exception as error:  # a client's own failure, as it will be in the round
            log.info("%s could not be looked at before the first round: %s", names[0], error)
            return []
    held: dict[tuple[int, int, bool], list[tuple[ClientId, Samples]]] = {}
    for name in sorted(population):
        if name in without:
            continue
        data = population[name]
        try:
            own = Samples.of(data)
        except ValueError as error:
            raise ConfigError(f"client {name}: {error}") from error
        # By storage: thousands of clients may share one, which is then looked at once.
        held.setdefault((id(own.x), id(own.y), False), []).append((name, own))
        if isinstance(data, ClientData):
            held.setdefault((id(data.test.x), id(data.test.y), True), []).append((name, data.test))
    return [merge_store(some, is_test) for (_, _, is_test), some in held.items()]


def merge_store(some: Sequence[tuple[ClientId, Samples]], test: bool) -> SampleStore:
    """One store for clients that share a storage."""
    first = some[0][1]
    rows = [np.arange(len(s)) if s.index is None else s.index for _, s in some]
    offsets = np.cumsum([0, *map(len, rows)])
    return SampleStore(first.x, first.y, [name for name, _ in some], np.concatenate(rows), offsets, test=test)


LAZY_CLIENTS_CHECKED = 3  # lazily loaded clients whose first batch is checked
CLASSIFICATION_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
NUMBERING_HINT = "number the classes of all clients at once, from 0, with mutirao.number_classes"
IGNORE_INDEX = -100  # what torch's losses leave out


def check_start(trainer: PlainTrainer, arrays: Arrays, population: Mapping[ClientId, Any]) -> None:
    """Check the data and a first batch; ConfigError for the first fault. Random states and modules stay unchanged."""
    stores = stores_of(population)
    model = copy_model(trainer, arrays)
    least = 2 if trainer.needs_two_samples() else 1
    raise_first(fault for store in stores for fault in (find_too_few(store, least), *find_not_finite(store)))
    kinds: dict[Any, list[SampleStore]] = {}
    for store in stores:
        kinds.setdefault(store.kind, []).append(store)
    with one_thread(), seeded(0, trainer.torch_device()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # This warning means that the loss compares each row with all others.
        warnings.filterwarnings("error", message="Using a target size")
        for some in kinds.values():
            check_kind(trainer, model, some)


def copy_model(trainer: PlainTrainer, arrays: Arrays) -> nn.Module:
    """A copy of the module that holds `arrays`."""
    try:
        module = trainer.fill(arrays)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with contextlib.suppress(RuntimeError):  # a few modules cannot be copied; the next use fills this one anew
        module = copy.deepcopy(module)
    return trainer.state_names.prepare(module)


def raise_first(faults: Any) -> None:
    """Raise the fault of the client whose name comes first, if there is any fault."""
    if found := [fault for fault in faults if fault is not None]:
        raise ConfigError(min(found)[1])


def find_too_few(store: SampleStore, least: int) -> Fault | None:
    """The fault of a client without samples, or with one where batch normalisation needs two."""
    if store.test:
        return None
    sizes = np.diff(store.offsets)
    for i in np.flatnonzero(sizes < least).tolist():
        if (name := store.names[i]) not in store.without:
            has = "no samples to train on"
            if sizes[i]:
                has = "one sample, and batch normalisation needs two"
            return store.fault(i, f"has {has}; give it more, or leave it out with exclude={name}")
    return None


def find_not_finite(store: SampleStore) -> Iterator[Fault | None]:
    """The faults of clients whose numbers contain NaN or infinity."""
    at_hand = [] if isinstance(store.x, LazyInputs) else named_inputs(store.x)
    for what, numbers in [*at_hand, ("y", store.y)]:
        # One NaN or infinity spoils the sum, and a sum needs no mask. If it merely overflows, no owner is found below.
        if not numbers.is_floating_point() or bool(torch.isfinite(numbers.sum())):
            continue
        if (found := store.owner(rows_with(~torch.isfinite(numbers)))) is not None:
            i, place = found
            words = f"{what} holds NaN or infinity, first in sample {place}; fill in or drop such samples"
            yield store.fault(i, words)


def rows_with(marks: Tensor) -> npt.NDArray[np.bool_]:
    """Which rows contain a marked entry."""
    if marks.dim() > 1:
        marks = marks.flatten(1).any(1)
    rows: npt.NDArray[np.bool_] = marks.numpy()
    return rows


def check_kind(trainer: PlainTrainer, model: nn.Module, stores: Sequence[SampleStore]) -> None:
    """Check one batch of the first client that has samples of this kind, and all clients' labels."""
    inhabited = [store for store in stores if next(store.clients(), None) is not None]
    if not inhabited:
        return
    first = min(inhabited, key=first_client)
    most = 1
    if isinstance(first.x, LazyInputs):
        # Lazy samples were not searched for NaN, so the batches of a few more clients are.
        most = LAZY_CLIENTS_CHECKED
    for i in itertools.islice(first.clients(), most):
        rows = np.arange(min(len(first.samples_of(i)), trainer.batch_size))
        # With batch normalisation, a single test sample or batches of one cannot be checked.
        if len(rows) > 1 or not trainer.needs_two_samples():
            check_batch(trainer, model, first, i, rows, stores)


def first_client(store: SampleStore) -> tuple[ClientId, bool]:
    """The first client of a store; training data sort before test data."""
    return store.names[next(store.clients())], store.test


def check_batch(
    trainer: PlainTrainer, model: nn.Module, store: SampleStore, i: int, rows: Index, stores: Sequence[SampleStore]
) -> None:
    """Run some samples of a client through model, loss and backward pass, and check all labels on the way."""

    def refuse(words: str, error: Exception | None = None) -> None:
        raise ConfigError(store.fault(i, words)[1]) from error

    x, y = trainer.to_device(store.samples_of(i)).batch(rows)
    if not all(bool(torch.isfinite(t).all()) for t in tensors_in(x) if t.is_floating_point()):
        refuse("x holds NaN or infinity among its first samples; fill in or drop such samples")
    if trainer.transform is not None and not store.test:
        x = check_transform(trainer.transform, x, len(y), refuse)
    try:
        outputs = call_model(model, x)
    except Exception as error:  # a model may raise anything at what it does not expect
        refuse(
            f"the model does not take its inputs, {describe_inputs(x)}: {error_text(error)}; {input_hint(model, x)}",
            error,
        )
    if is_classes(y):
        if not isinstance(outputs, Tensor):
            refuse(f"the model gives a {type(outputs).__name__} where classes need a tensor, a number for each class")
        check_label_range(trainer.loss, outputs, stores)
    pair = f"outputs {describe_result(outputs)} and labels {describe_tensor(y)}"
    try:
        loss = trainer.loss(outputs, y)
        if is_classes(y):
            (outputs.argmax(-1) == y).sum()
    except Exception as error:  # of a loss, too
        refuse(f"the loss does not take {pair}: {error_text(error)}; {label_hint(outputs, y, error)}", error)
    if not isinstance(loss, Tensor) or loss.dim():
        what = describe_result(loss)
        refuse(f"the loss of a batch is {what}, not one number; it should be a mean over samples (reduction='mean')")
    if not bool(torch.isfinite(loss)):
        refuse(f"the loss of a first batch is {float(loss)}; scale its inputs, or its labels")
    if not loss.requires_grad:
        refuse("the loss has no gradient: nothing that is trained takes part in it, or it was detached on the way")
    weights = [p for p in model.parameters() if p.requires_grad]
    try:
        slopes = torch.autograd.grad(loss, weights, allow_unused=True)
    except RuntimeError as error:
        refuse(f"the loss has no gradient: {error_text(error)}", error)
    if all(g is None for g in slopes):
        refuse("the loss does not depend on any weight that is trained")
    if not all(bool(torch.isfinite(g).all()) for g in slopes if g is not None):
        refuse("the gradient of a first batch is not finite; scale its inputs, or its labels")
    if is_classes(y) and not is_classification_loss(trainer.loss):
        try_extremes(trainer, model, stores)


def describe_result(value: Any) -> str:
    """The dtype and shape of a tensor, or the type of anything else."""
    if isinstance(value, Tensor):
        return describe_tensor(value)
    return type(value).__name__


def check_transform(transform: Any, x: Any, n: int, refuse: Callable[..., None]) -> Any:
    """The transformed inputs; the transform must be a function of its inputs and generator alone."""
    try:
        made = [transform(map_tensors(x, Tensor.clone), rng(0, 0, "preflight")) for _ in range(2)]
    except Exception as error:  # a user's own function
        refuse(f"transform(x, rng) does not take its inputs, {describe_inputs(x)}: {error_text(error)}", error)
    first, again = map(tensors_in, made)
    if len(first) != len(again) or not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
        refuse("transform(x, rng) gives other inputs each time; it should draw from `rng` alone")
    if any(len(t) != n for t in first):
        refuse(f"transform(x, rng) makes {len(first[0])} samples of {n}; each should stay one")
    return made[0]


def is_classification_loss(loss: Any) -> bool:
    """Whether it is one of torch's losses that take a class index for each row of outputs."""
    return loss in (functional.cross_entropy, functional.nll_loss) or isinstance(loss, CLASSIFICATION_LOSSES)


def check_label_range(loss: Any, outputs: Tensor, stores: Sequence[SampleStore]) -> None:
    """Raise for labels without a model output, naming the first client that has them."""
    if is_classification_loss(loss) and outputs.dim() > 1 and stores[0].y.dim() == outputs.dim() - 1:
        raise_first(
            labels_out_of_range(store, outputs.shape[1], getattr(loss, "ignore_index", IGNORE_INDEX))
            for store in stores
        )


def try_extremes(trainer: PlainTrainer, model: nn.Module, stores: Sequence[SampleStore]) -> None:
    """Evaluate a custom loss on the smallest and the largest label, as only the loss defines which it accepts."""
    stores = [store for store in stores if store.y.numel()]
    for extreme, most in ((torch.amin, min), (torch.amax, max)):
        store = most(stores, key=lambda store: int(extreme(store.y)))
        label = int(extreme(store.y))
        found = store.owner(rows_with(store.y == label))
        if found is not None:
            # Two copies, as batch normalisation needs two samples.
            x, y = store.samples_of(found[0]).batch(np.array([found[1]] * 2))
            try:
                trainer.loss(call_model(model, x), y)
            except Exception as error:  # a loss may raise anything
                words = f"the loss does not take label {label}: {error_text(error)}; {NUMBERING_HINT}"
                raise ConfigError(store.fault(found[0], words)[1]) from error


def error_text(error: Exception) -> str:
    """The message of an exception in one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def labels_out_of_range(store: SampleStore, count: int, ignored: int) -> Fault | None:
    """The fault of labels outside of 0 to count - 1."""
    y = store.y
    if y.numel() == 0 or (int(y.min()) >= 0 and int(y.max()) < count):
        return None
    wrong = ((y < 0) | (y >= count)) & (y != ignored)
    found = store.owner(rows_with(wrong))
    if found is None:
        return None
    own = store.samples_of(found[0]).batch(slice(None))[1]
    own = own[own != ignored]
    low = int(own.min())
    high = int(own.max())
    right = NUMBERING_HINT
    if low >= 0:
        right += f", or give the model {high + 1} outputs"
    words = f"labels run from {low} to {high}, and the model has {count} outputs, for labels 0 to {count - 1}; {right}"
    return store.fault(found[0], words)


def describe_inputs(x: Any) -> str:
    """Inputs in a few words."""
    if isinstance(x, Tensor):
        return describe_tensor(x)
    return ", ".join(f"{name.removeprefix('x')} {describe_tensor(t)}" for name, t in named_inputs(x))


def input_hint(model: nn.Module, x: Any) -> str:
    """What to change about inputs that a model does not accept."""
    wants = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    odd = {t.dtype for t in tensors_in(x)} - {wants}
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    if odd and not embeds:
        name = str(wants).removeprefix("torch.")
        return f"its weights are {name}: give inputs of that type, such as x.astype('{name}'), bytes divided by 255"
    if embeds and not odd:
        return "its embedding takes whole numbers: give inputs as int64"
    return "its first layer and a sample should agree in shape"


def label_hint(outputs: Any, y: Tensor, error: Exception) -> str:
    """What to change about labels that a loss does not accept."""
    if isinstance(error, IndexError):
        return NUMBERING_HINT
    if isinstance(outputs, Tensor) and outputs.shape != y.shape and outputs.numel() == y.numel():
        return f"give labels the shape {list(outputs.shape)}, or the outputs that of the labels"
    wanted = "classes, int64"
    if is_classes(y):
        wanted = "float32"
    return f"this loss may want labels as {wanted}, or in another shape"
