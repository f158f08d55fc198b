"""Accelerated self-attention and Transformer encoder layers, by kernels in C (`attention.c`, `encoder_pass.h`).

One product gives queries, keys and values side by side. For short sequences a kernel computes attention directly from
these rows, without the copies that torch makes of them and of their gradients. A whole encoder layer takes one kernel
call each way: a few samples pass through at a time, so that each part finds its input in the cache. The results are
torch's except for rounding.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mutirao.training.engine.tracer import Tracer

try:
    from mutirao.training.engine import _attention  # type: ignore[attr-defined]  # compiled
except ImportError:  # installed without a C compiler
    _attention = None

kernel: Any = _attention
MAX_TOKENS = 1024  # tokens: beyond, little is left of the kernel's lead over torch's own
MAX_HEAD_SIZE = 128  # numbers of a head


def accelerate_attention(module: nn.Module) -> nn.Module:
    """The module with self-attention computed by the kernel where possible; names and weights stay the same."""
    for attention in module.modules():
        if type(attention) is nn.MultiheadAttention and supports_attention(attention):
            attention.forward = partial(attend, attention)  # type: ignore[method-assign]
    return module


def supports_attention(attention: nn.MultiheadAttention) -> bool:
    """Whether the layer can be accelerated: one projection matrix, batches first, no extra rows."""
    return (
        attention._qkv_same_embed_dim
        and attention.batch_first
        and attention.bias_k is None
        and attention.bias_v is None
        and not attention.add_zero_attn
    )


def attend(
    attention: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The layer's output for a sequence that attends to itself; torch computes every other case."""
    weight = attention.in_proj_weight
    if (
        query is key is value
        and not need_weights
        and not is_causal
        and not (attention.dropout and attention.training)
        and key_padding_mask is attn_mask is None
        and type(query) is Tensor
        and query.dtype == weight.dtype == torch.float32
        and query.device.type == weight.device.type == "cpu"
        and query.dim() == 3
        and query.numel() > 0
        and query.shape[2] == attention.embed_dim
        and is_plain_execution()
    ):
        packed = functional.linear(query, weight, attention.in_proj_bias)
        mixed = scaled_attention(packed, attention.num_heads)
        return functional.linear(mixed, attention.out_proj.weight, attention.out_proj.bias), None
    return nn.MultiheadAttention.forward(
        attention,
        query,
        key,
        value,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )


def is_plain_execution() -> bool:
    """Whether operations run as they are: nothing is stacked, traced or cast."""
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and not isinstance(_get_current_dispatch_mode(), Tracer)
        and not torch.is_autocast_enabled("cpu")
    )


def scaled_attention(packed: Tensor, heads: int) -> Tensor:
    """softmax(q k' / sqrt(size)) v for each head, from rows that hold q, k and v."""
    count, length, width = packed.shape
    size = width // 3 // heads
    if kernel is not None and length <= MAX_TOKENS and size <= MAX_HEAD_SIZE:
        return AttentionKernel.apply(packed, heads)  # type: ignore[no-any-return, no-untyped-call]
    q, k, v = packed.view(count, length, 3, heads, size).permute(2, 0, 3, 1, 4).unbind()  # its gradient is one copy
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return mixed.transpose(1, 2).reshape(count, length, width // 3)


def attention_scale(packed: Tensor, heads: int) -> float:
    """The factor of attention scores: 1 / sqrt(size of a head)."""
    return float((packed.shape[2] // 3 // heads) ** -0.5)


class AttentionKernel(torch.autograd.Function):
    """The attention kernel as an autograd function."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, heads: int) -> Tensor:
        """As `scaled_attention`; saves each row's largest score and the divisor of its weights."""
        count, length, width = packed.shape
        mixed = torch.empty(count, length, width // 3)
        scales = torch.empty(count, heads, 2, length)
        kernel.forth(attention_scale(packed, heads), packed.detach().numpy(), mixed.numpy(), scales.numpy())
        ctx.save_for_backward(packed, scales)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradients of queries, keys and values, side by side."""
        packed, scales = ctx.saved_tensors
        slopes = torch.empty_like(packed)
        kernel.back(
            attention_scale(packed, scales.shape[1]),
            packed.detach().numpy(),
            gradient.contiguous().numpy(),
            scales.numpy(),
            slopes.numpy(),
        )
        return slopes, None


WIDTH_MULTIPLE = 16  # what the widths must be multiples of
MAX_WEIGHTS = 150_000  # weights of a product: beyond, they leave the cache, and torch's products are better


def accelerate_encoders(module: nn.Module) -> nn.Module:
    """The module with attention and whole encoder layers computed by the kernel where possible."""
    accelerate_attention(module)
    if kernel is None:
        return module
    for layer in module.modules():
        if type(layer) is nn.TransformerEncoderLayer and supports_encoder(layer):
            layer.forward = partial(run_encoder, layer)  # type: ignore[method-assign]
    return module


def supports_encoder(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the kernel can compute this layer: norms after the sums, ReLU, plain parts with all their weights."""
    inner = layer.self_attn
    dense = (layer.linear1, layer.linear2)
    norms = (layer.norm1, layer.norm2)
    return (
        type(inner) is nn.MultiheadAttention
        and supports_attention(inner)
        and all(type(part) is nn.Linear for part in dense)
        and all(type(part) is nn.LayerNorm for part in norms)
        and not layer.norm_first
        and layer.activation_relu_or_gelu == 1
        and all(weight is not None for weight in encoder_weights(layer))
        and inner.head_dim <= MAX_HEAD_SIZE
        and inner.embed_dim % WIDTH_MULTIPLE == layer.linear1.out_features % WIDTH_MULTIPLE == 0
        and inner.embed_dim * max(3 * inner.embed_dim, layer.linear1.out_features) <= MAX_WEIGHTS
    )


def encoder_weights(layer: nn.TransformerEncoderLayer) -> list[Tensor]:
    """The weights of a layer in the order of their use."""
    inner = layer.self_attn
    pairs = (layer.self_attn.out_proj, layer.norm1, layer.linear1, layer.linear2, layer.norm2)
    return [inner.in_proj_weight, inner.in_proj_bias, *(w for part in pairs for w in (part.weight, part.bias))]


def run_encoder(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The layer's output for sequences without masks; torch computes every other case."""
    weights = encoder_weights(layer)
    if (
        src_mask is src_key_padding_mask is None
        and not is_causal
        and type(src) is Tensor
        and src.dim() == 3
        and 0 < src.shape[1] <= MAX_TOKENS
        and len(src) > 0
        and src.shape[2] == layer.self_attn.embed_dim
        and all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in (src, *weights))
        and not (layer.training and any(p.p for p in (layer.dropout, layer.dropout1, layer.dropout2)))
        and not (layer.training and layer.self_attn.dropout)
        and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in layer.children())
        and is_plain_execution()
    ):
        heads = layer.self_attn.num_heads
        least = (layer.norm1.eps, layer.norm2.eps)
        return EncoderKernel.apply(heads, least, src, *weights)  # type: ignore[no-any-return, no-untyped-call]
    return nn.TransformerEncoderLayer.forward(layer, src, src_mask, src_key_padding_mask, is_causal)


class EncoderKernel(torch.autograd.Function):
    """The encoder kernel as an autograd function."""

    @staticmethod
    def forward(ctx: Any, heads: int, least: tuple[float, float], x: Tensor, *weights: Tensor) -> Tensor:
        """norm2(z + linear2(relu(linear1(z)))), where z is norm1(x + attention(x))."""
        count, length, width = x.shape
        ctx.settings = ((width // heads) ** -0.5, *least)
        y, mixed, *hats = (torch.empty_like(x) for _ in range(4))
        packed, inner = (torch.empty(count, length, size) for size in (3 * width, weights[6].shape[0]))
        kept = (packed, torch.empty(count, heads, 2, length), mixed, *hats, inner, torch.empty(2, count, length))
        kernel.encode(*ctx.settings, numpy_views(x, y, *weights, *kept))
        ctx.save_for_backward(x, *weights, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and of all weights."""
        x, *held = ctx.saved_tensors
        slopes = [torch.empty_like(t) for t in (x, *held[:12])]
        kernel.encode_back(*ctx.settings, numpy_views(x, gradient.contiguous(), *held, *slopes))
        return None, None, *slopes


def numpy_views(*tensors: Tensor) -> tuple[Any, ...]:
    """The tensors as NumPy views, which the kernel takes."""
    return tuple(tensor.detach().numpy() for tensor in tensors)
