"""Trace a training step once as a list of tensor operations, simplify the list, and replay it without autograd.

The trace is taken below autograd and vmap, so that it holds the plain operations of forward pass, backward pass and
update. Tracing twice, with two and with three clients, shows which numbers are the number of clients; so one trace
serves stacks of any size. `torch.jit` freezes a trace where it can: it is deprecated, hence optional.
"""

import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger("mutirao")
aten = torch.ops.aten

Program = Callable[..., tuple[Tensor, ...]]

# Views of the same numbers in the same shape: the trace does without them.
VIEW_NAMES = ("detach", "alias", "lift_fresh", "view", "_unsafe_view", "expand", "reshape")
VIEWS = {getattr(aten, name).default for name in VIEW_NAMES}
# Operations that read a value into Python, or a shape from values: another batch may take another path.
DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unsupported(Exception):
    """A step cannot be traced; the message says why."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every tensor operation below autograd into a graph."""

    def __init__(self, inputs: Sequence[Tensor], generator: torch.Generator | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.generator = generator
        self.generator_node = self.graph.placeholder("draw") if generator is not None else None
        self.root = torch.nn.Module()
        self.nodes: dict[int, fx.Node] = {}
        # References keep tensors alive, so that no id and no storage is reused.
        self.kept_alive: list[Any] = []
        for i, tensor in enumerate(inputs):
            self._register(tensor, self.graph.placeholder(f"input_{i}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # or torch imports its compiler, which takes a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and append it to the graph."""
        kwargs = kwargs or {}
        if self.generator is not None and is_random(func) and takes_generator(func):
            args = args[: [a.name for a in func._schema.arguments].index("generator")]
            kwargs = {**kwargs, "generator": self.generator}
        else:
            check_repeatable(func)
        if func._schema.is_mutable:
            for written in arguments_written(func, args, kwargs):
                if self.node_of(written).op == "get_attr":
                    raise Unsupported(f"it changes a tensor that is not part of its state ({func})")
        out = func(*args, **kwargs)
        node = self.graph.call_function(func, self._nodes_in(args), self._nodes_in(kwargs))
        if isinstance(out, Tensor):
            self._register(out, node)
        else:
            for i, one in enumerate(out):
                if isinstance(one, Tensor):
                    self._register(one, self.graph.call_function(operator.getitem, (node, i)))
        return out

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that made a tensor; a tensor from outside the step becomes a constant."""
        if id(tensor) not in self.nodes:
            name = f"constant_{len(self.nodes)}"
            self.root.register_buffer(name, tensor.detach())
            self._register(tensor, self.graph.get_attr(name))
        return self.nodes[id(tensor)]

    def _register(self, tensor: Tensor, node: fx.Node) -> None:
        self.kept_alive.append(tensor)
        # An in-place operation returns a tensor that is registered already.
        self.nodes.setdefault(id(tensor), node)
        node.meta.setdefault("shapes", (tuple(tensor.shape),))
        node.meta.setdefault("dtype", tensor.dtype)
        node.meta.setdefault("storage", storage_pointer(tensor))

    def _nodes_in(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, torch.Generator):
            return self.generator_node
        if isinstance(value, dict):
            return {k: self._nodes_in(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._nodes_in(v) for v in value)
        return value


def storage_pointer(tensor: Tensor) -> int:
    """The address of a tensor's storage; two tensors may share one."""
    return tensor.untyped_storage().data_ptr()


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def takes_generator(func: Any) -> bool:
    """Whether an operation accepts a generator."""
    return any(a.name == "generator" for a in func._schema.arguments)


def check_repeatable(func: Any) -> None:
    """Raise for an operation whose result a replay would not repeat."""
    if is_random(func):
        raise Unsupported(f"it is random ({func})")
    if DEPENDS_ON_DATA & set(func.tags):
        raise Unsupported(f"what it does depends on the data ({func})")


def arguments_written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to: tensors while tracing, nodes afterwards."""
    written: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    return [w for w in written if w is not None]


def trace_step(
    step: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], generator: torch.Generator | None = None
) -> fx.GraphModule:
    """The operations of `step(*inputs)`, which may write to its inputs; random ones draw from `generator`."""
    recorder = Tracer(inputs, generator)
    with recorder:
        outputs = step(*inputs)
    recorder.graph.output(tuple(recorder.node_of(o) for o in outputs))
    return fx.GraphModule(recorder.root, recorder.graph)


def merge_traces(two: fx.GraphModule, three: fx.GraphModule) -> fx.GraphModule:
    """One trace for any number of clients, its first input, from traces with two and with three clients."""
    graph = two.graph
    pairs = list(zip(two.graph.nodes, three.graph.nodes, strict=False))
    if len(graph.nodes) != len(three.graph.nodes):
        raise Unsupported("its operations depend on the number of clients")
    with graph.inserting_before(pairs[0][0]):
        clients = graph.placeholder("clients")
    for a, b in pairs:
        if (a.op, a.name) != (b.op, b.name) or (a.op == "call_function" and a.target is not b.target):
            raise Unsupported("its operations depend on the number of clients")
        a.meta["shapes"] = (*a.meta.get("shapes", ()), *b.meta.get("shapes", ()))
        with graph.inserting_before(a):
            a.args = _join_values(a.args, b.args, clients)
            a.kwargs = _join_values(a.kwargs, b.kwargs, clients)
    return two


def _join_values(a: Any, b: Any, clients: fx.Node) -> Any:
    """The arguments where they agree; u for two clients and v for three become (v - u) k + 3u - 2v."""
    if isinstance(a, fx.Node):
        return a
    if isinstance(a, list | tuple):
        return type(a)(_join_values(x, y, clients) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {key: _join_values(a[key], b[key], clients) for key in a}
    if isinstance(a, int) and not isinstance(a, bool) and a != b:
        # The line through (2, a) and (3, b), as operations on the number of clients.
        scaled = clients if b - a == 1 else clients.graph.call_function(operator.mul, (clients, b - a))
        if 3 * a == 2 * b:
            return scaled
        return clients.graph.call_function(operator.add, (scaled, 3 * a - 2 * b))
    if a != b:
        raise Unsupported("its numbers depend on the number of clients")
    return a


def simplify_trace(trace: fx.GraphModule) -> fx.GraphModule:
    """Remove identities, fuse products with sums, and drop unused results."""
    history = StorageHistory(trace.graph)
    for node in list(trace.graph.nodes):
        for rule in (drop_identity, undo_transpose, transpose_product, fuse_sum, fold_constants):
            if node.op == "call_function" and (better := rule(node, history, trace)) is not None:
                node.replace_all_uses_with(better)
                trace.graph.erase_node(node)
                break
    for node in reversed(trace.graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not storages_written(node):
            trace.graph.erase_node(node)
    trace.recompile()
    return trace


class StorageHistory:
    """When each storage is written and last read, to see whether a read can be delayed."""

    def __init__(self, graph: fx.Graph) -> None:
        self.written: dict[int, list[int]] = {}
        self.last_read: dict[int, int] = {}
        for time, node in enumerate(graph.nodes):
            node.meta["time"] = time
            for read in node.all_input_nodes:
                self.last_read[read.meta.get("storage", 0)] = time
            for target in storages_written(node):
                self.written.setdefault(target.meta["storage"], []).append(time)

    def unchanged(self, node: fx.Node, since: int, until: int) -> bool:
        """Whether a value read at `since` is the same at `until`."""
        return not any(since < t <= until for t in self.written.get(node.meta["storage"], ()))


def storages_written(node: fx.Node) -> list[fx.Node]:
    """The nodes whose storage an operation writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    return arguments_written(node.target, node.args, node.kwargs)


def drop_identity(node: fx.Node, history: StorageHistory, trace: fx.GraphModule) -> fx.Node | None:
    """Replace a view in the same shape, or a product with one, by its argument."""
    if node.target in VIEWS and same_shape(node, node.args[0]):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        return source
    if node.target not in (aten.mul.Scalar, aten.mul.Tensor):
        return None
    for factor, other in (node.args[:2], node.args[1::-1]):
        if is_one(other) and isinstance(factor, fx.Node) and same_shape(node, factor) and same_type(node, factor):
            of_product = node.meta["storage"]
            time = node.meta["time"]
            if of_product not in history.written and history.unchanged(
                factor, time, history.last_read.get(of_product, time)
            ):
                return factor
    return None


def is_one(value: Any) -> bool:
    """Whether a factor is 1, or a tensor of ones, with which every backward pass begins."""
    if not isinstance(value, fx.Node):
        return bool(value == 1)
    if value.target in (aten.expand.default, aten.view.default, aten.unsqueeze.default):
        return is_one(value.args[0])
    return value.target is aten.ones_like.default


def undo_transpose(node: fx.Node, history: StorageHistory, trace: fx.GraphModule) -> fx.Node | None:
    """Replace the transpose of a transpose by its argument."""
    if node.target is aten.transpose.int and is_call(node.args[0], aten.transpose.int):
        inner: Any = node.args[0]
        if set(inner.args[1:]) == set(node.args[1:]):
            source: fx.Node = inner.args[0]
            return source
    return None


def transpose_product(node: fx.Node, history: StorageHistory, trace: fx.GraphModule) -> fx.Node | None:
    """Replace (A B)^T by B^T A^T: no copy, and a sum with it can be fused."""
    if node.target is not aten.transpose.int or set(node.args[1:]) != {1, 2}:
        return None
    if (factors := factors_of(node.args[0], node, history)) is None:
        return None

    def turn(factor: fx.Node) -> Any:
        if is_call(factor, aten.transpose.int) and set(factor.args[1:]) == {1, 2}:
            return factor.args[0]
        return insert_call(trace.graph, node, aten.transpose.int, (factor, 1, 2), storage=factor.meta["storage"])

    with trace.graph.inserting_before(node):
        return insert_call(trace.graph, node, aten.bmm.default, tuple(turn(factor) for factor in reversed(factors)))


def fuse_sum(node: fx.Node, history: StorageHistory, trace: fx.GraphModule) -> fx.Node | None:
    """Replace C + a A B by one operation; likewise the update of a weight along its gradient."""
    signs: dict[Any, int] = {aten.add.Tensor: 1, aten.add_.Tensor: 1, aten.sub_.Tensor: -1}
    if (sign := signs.get(node.target)) is None:
        return None
    first, second = node.args[:2]
    alpha: Any = node.kwargs.get("alpha", 1)
    if node.target is aten.add.Tensor and alpha == 1 and is_call(first, aten.bmm.default):
        first, second = second, first
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or not same_type(first, second):
        return None
    if node.meta["shapes"] != second.meta["shapes"] or (factors := factors_of(second, node, history)) is None:
        return None
    target = aten.baddbmm.default if node.target is aten.add.Tensor else aten.baddbmm_.default
    with trace.graph.inserting_before(node):
        return insert_call(trace.graph, node, target, (first, *factors), {"alpha": sign * alpha})


def fold_constants(node: fx.Node, history: StorageHistory, trace: fx.GraphModule) -> fx.Node | None:
    """Compute an operation on constants once."""
    if node.all_input_nodes or node.meta.get("storage") in history.written or "storage" not in node.meta:
        return None
    name = f"folded_{node.name}"
    trace.register_buffer(name, node.target(*node.args, **node.kwargs))  # type: ignore[operator]
    with trace.graph.inserting_before(node):
        constant = trace.graph.get_attr(name)
    constant.meta.update(node.meta)
    return constant


def is_call(node: Any, target: Any) -> bool:
    """Whether a node calls this operation."""
    return isinstance(node, fx.Node) and node.target is target


def same_shape(a: fx.Node, b: Any) -> bool:
    """Whether two tensors have the same shape, whatever the number of clients."""
    return isinstance(b, fx.Node) and "shapes" in a.meta and a.meta["shapes"] == b.meta.get("shapes")


def same_type(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors have the same dtype."""
    return bool(a.meta["dtype"] == b.meta["dtype"])


def factors_of(product: Any, reader: fx.Node, history: StorageHistory) -> Any:
    """The two factors of a product that only `reader` uses, if they are unchanged until then."""
    if not is_call(product, aten.bmm.default) or len(product.users) != 1:
        return None
    late = all(history.unchanged(f, product.meta["time"], reader.meta["time"]) for f in product.args)
    if late:
        return product.args
    return None


def insert_call(
    graph: fx.Graph, instead: fx.Node, target: Any, args: Any, kwargs: Any = None, storage: Any = None
) -> fx.Node:
    """A new operation in place of another, at the same time."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta.update(instead.meta, storage=instead.meta["storage"] if storage is None else storage)
    return node


def freeze_program(program: Program, inputs: Sequence[Tensor]) -> Program | None:
    """The program without Python in between, or None where torch.jit does not give exactly the same results.

    `inputs` serve as an example; what the program writes to is copied before.
    """

    def plain(*tensors: Tensor) -> tuple[Tensor, ...]:  # torch.jit wants a function
        return program(*tensors)

    def trial(run: Program) -> list[Tensor]:
        copies = [t.clone() for t in inputs]
        return [*run(*copies), *copies]

    try:
        with warnings.catch_warnings(), torch.inference_mode():
            # torch.jit is deprecated; without it the program itself is replayed.
            warnings.simplefilter("ignore")
            fast = torch.jit.trace(plain, tuple(t.clone() for t in inputs), check_trace=False)  # type: ignore[no-untyped-call]
            # torch.jit optimises a program in its second run.
            trial(fast)
            same = all(torch.equal(a, b) for a, b in zip(trial(fast), trial(plain), strict=True))
    except Exception as error:
        log.debug("torch.jit cannot freeze a step: %s", error)
        return None
    if not same:
        return None
    frozen: Program = fast
    return frozen
