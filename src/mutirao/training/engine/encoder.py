"""A whole encoder layer in two calls of a kernel in C (`attention.c`, `encoder_pass.h`), one forth and one back.

A few samples go through at a time, so that what one part of the layer makes is in the cache when the next one reads it.
The numbers are torch's but for rounding.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mutirao.training.engine import attention
from mutirao.training.engine.attention import MAX_HEAD_SIZE, MAX_TOKENS, accelerate_attention, is_plain_execution

WIDTH_MULTIPLE = 16  # what the widths must be multiples of
MAX_WEIGHTS = 150_000  # weights of a product: beyond, they leave the cache, and torch's products are better


def accelerate_encoders(module: nn.Module) -> nn.Module:
    """The module with its attention, and its encoder layers as a whole, done here where that fits."""
    for layer in accelerate_attention(module).modules() if attention.kernel is not None else ():
        if type(layer) is nn.TransformerEncoderLayer and supports_encoder(layer):
            layer.forward = partial(encode, layer)  # type: ignore[method-assign]
    return module


def supports_encoder(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the kernel can do this layer: norms behind the sums, ReLU, plain parts with all their weights."""
    inner = layer.self_attn
    dense, norms = (layer.linear1, layer.linear2), (layer.norm1, layer.norm2)
    return (
        type(inner) is nn.MultiheadAttention
        and attention.supports_attention(inner)
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
    inner, pairs = layer.self_attn, (layer.self_attn.out_proj, layer.norm1, layer.linear1, layer.linear2, layer.norm2)
    return [inner.in_proj_weight, inner.in_proj_bias, *(w for part in pairs for w in (part.weight, part.bias))]


def encode(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """What the layer makes of sequences without masks; torch does all else."""
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
        heads, least = layer.self_attn.num_heads, (layer.norm1.eps, layer.norm2.eps)
        return EncoderKernel.apply(heads, least, src, *weights)  # type: ignore[no-any-return, no-untyped-call]
    return nn.TransformerEncoderLayer.forward(layer, src, src_mask, src_key_padding_mask, is_causal)


class EncoderKernel(torch.autograd.Function):
    """The kernel, as torch's gradients see it."""

    @staticmethod
    def forward(ctx: Any, heads: int, least: tuple[float, float], x: Tensor, *weights: Tensor) -> Tensor:
        """The layer's norm2(z + linear2(relu(linear1(z)))), where z is norm1(x + attention(x))."""
        count, length, width = x.shape
        ctx.settings = ((width // heads) ** -0.5, *least)
        y, mixed, *hats = (torch.empty_like(x) for _ in range(4))
        packed, inner = (torch.empty(count, length, size) for size in (3 * width, weights[6].shape[0]))
        kept = (packed, torch.empty(count, heads, 2, length), mixed, *hats, inner, torch.empty(2, count, length))
        attention.kernel.encode(*ctx.settings, numpy_views(x, y, *weights, *kept))
        ctx.save_for_backward(x, *weights, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and of all weights."""
        x, *held = ctx.saved_tensors
        slopes = [torch.empty_like(t) for t in (x, *held[:12])]
        attention.kernel.encode_back(*ctx.settings, numpy_views(x, gradient.contiguous(), *held, *slopes))
        return None, None, *slopes


def numpy_views(*tensors: Tensor) -> tuple[Any, ...]:
    """The tensors as the kernel takes them."""
    return tuple(tensor.detach().numpy() for tensor in tensors)
