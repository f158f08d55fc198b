"""A tape repeats what was recorded, whatever is written in place and whatever is joined."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from mutirao.training.engine.tracer import Unsupported, aten, freeze_program, merge_traces, simplify_trace, trace_step

Step = Callable[..., list[Tensor]]


def inputs(clients: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(clients)
    return [torch.randn(clients, *shape, generator=draw) for shape in ((4, 3), (3, 5), (6, 4), (6, 5))]


def factors(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """W = A B: the gradient of each factor is a product with the other, which must not have moved yet."""
    leaves = [t.detach().requires_grad_() for t in (a, b)]
    loss = vmap(lambda a, b, x, y: (x @ (a @ b) - y).square().mean())(*leaves, x, y)
    for weight, gradient in zip((a, b), torch.autograd.grad(loss.sum(), leaves), strict=True):
        with torch.no_grad():
            weight.sub_(gradient, alpha=0.5)
    return [loss.detach()]


def in_place(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Products that are read again after something was written."""
    one = a * 1
    product = torch.bmm(x, a)
    a.add_(1.0)
    total = torch.bmm(x, one) + torch.bmm(x, a)
    product.relu_()
    b.sub_(torch.bmm(a.transpose(1, 2), torch.ones_like(a)).sum(2, keepdim=True))
    return [total, product.add_(torch.bmm(x, a)), torch.bmm(x, a).transpose(1, 2) + x.sum((1, 2), keepdim=True)]


def shapes(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Sizes that grow with the number of clients, once and twice."""
    k = len(a)
    both = torch.cat([a.reshape(k * 4, 3), a.new_zeros(k, 3)])
    return [both, torch.arange(2 * k + 1), a.expand(2, *a.shape).reshape(2 * k, 4, 3)]


def types(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """A product with one that makes another type of it."""
    whole = (a * 10).long()
    return [whole * 1.0 / 3, (a > 0) * 1, whole * 1]


@pytest.mark.parametrize("step", [factors, in_place, shapes, types])
@pytest.mark.parametrize("clients", [1, 2, 5])
def test_a_tape_repeats_the_step(step: Step, clients: int) -> None:
    trace = simplify_trace(merge_traces(*(trace_step(step, inputs(k)) for k in (2, 3))))
    ours, theirs = inputs(clients), inputs(clients)
    for _ in range(3):
        expected = step(*theirs)
        for a, b in zip([*trace(clients, *ours), *ours], [*expected, *theirs], strict=True):
            torch.testing.assert_close(a, b)


def test_an_update_along_a_product_is_one_operation() -> None:
    trace = simplify_trace(merge_traces(*(trace_step(factors, inputs(k)) for k in (2, 3))))
    targets = [node.target for node in trace.graph.nodes]
    assert aten.baddbmm_.default in targets
    assert aten.detach.default not in targets
    assert len(targets) < len(trace_step(factors, inputs(2)).graph.nodes)


def test_a_frozen_program_does_not_touch_the_example() -> None:
    trace = simplify_trace(trace_step(factors, inputs(2)))
    example = inputs(2)
    fast = freeze_program(trace.forward, example)
    assert fast is not None
    for tensor, untouched in zip(example, inputs(2), strict=True):
        assert torch.equal(tensor, untouched)
    ours = inputs(2)
    expected = factors(*(theirs := inputs(2)))
    for a, b in zip([*fast(*ours), *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(a, b)


def test_what_cannot_be_frozen_is_not() -> None:
    assert freeze_program(lambda *tensors: (torch.rand(3),), inputs(2)) is None  # not the same twice
    assert freeze_program(lambda *tensors: (tensors[9],), inputs(2)) is None


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda a, b, x, y: [a * float(b.sum())], "depends on the data"),
        (lambda a, b, x, y: [a[a > 0]], "depends on the data"),
        (lambda a, b, x, y: [torch.dropout(a, 0.5, True)], "random"),
        (lambda a, b, x, y: [OUTSIDE.add_(1.0)], "not part of its state"),
    ],
)
def test_what_the_next_run_would_not_repeat_is_refused(step: Step, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        trace_step(step, inputs(2))


def test_operations_that_depend_on_the_number_of_clients_are_refused() -> None:
    def loop(*tensors: Tensor) -> list[Tensor]:
        return [sum(tensors[0].unbind(), torch.zeros(()))]

    def scaled(*tensors: Tensor) -> list[Tensor]:
        return [tensors[0] / (len(tensors[0]) + 0.5)]

    for step in (loop, scaled):
        with pytest.raises(Unsupported, match="number of clients"):
            merge_traces(*(trace_step(step, inputs(k)) for k in (2, 3)))


OUTSIDE = torch.zeros(1)
