"""Transformer blocks, each read out on its own: the score that the head gives to what one block returned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from explain.errors import MethodError
from explain.hooks import HookGroup, first_tensor, replace_first
from explain.hooks.attention import attention, by_image
from explain.inputs import Inputs
from explain.layers import grids_of
from explain.targets import Target


def transformer_blocks(model: nn.Module) -> list[str]:
    """Name the blocks: of the modules that hold exactly one attention, the largest ones.

    >>> from torchvision.models import VisionTransformer
    >>> transformer_blocks(VisionTransformer(16, 4, 2, 2, 8, 16))
    ['encoder.layers.encoder_layer_0', 'encoder.layers.encoder_layer_1']
    """
    attentions: list[str] = []
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        inside = any(name.startswith(f"{outer}.") for outer in attentions)
        if not inside and ("attention" in kind or "attn" in kind):
            attentions.append(name)
    blocks = []
    for name in attentions:
        parts = name.split(".")
        ancestors = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        alone = [a for a in ancestors if sum(f"{other}.".startswith(f"{a}.") for other in attentions) == 1]
        blocks.append(alone[0])
    return blocks


def attention_gradients(model: nn.Module, inputs: Inputs, target: Any) -> list[torch.Tensor]:
    """For each block, the gradient in its attention ``(N, heads, T, T)`` of the score read off its output.

    The output tokens are averaged, and take the place of every token on the way into what comes after the last block:
    whichever of them the network reads, it reads the mean. One forward pass does for all blocks, since the last one
    returns a batch with the outputs of all of them; each starts a graph of its own, so one backward pass does too.

    Raises:
        MethodError: the network has no such blocks.
    """
    blocks = transformer_blocks(model)
    if len(blocks) < 2:
        raise MethodError(
            f"legrad must have at least two transformer blocks, got {len(blocks)} in {type(model).__name__}; use it "
            "for vision transformers (ViT, DeiT), and gradcam or layercam otherwise"
        )
    grids = grids_of(model, inputs)
    of_blocks = [grids.grid((len(inputs), 0, 0), name) for name in blocks]  # known by name, whatever the shape
    of_images = 1 if any(grid is not None and grid.of_images for grid in of_blocks) else 0
    starts: list[torch.Tensor] = []
    means: list[torch.Tensor] = []

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = None if args else first_keyword(module, kwargs)
        starts.append(_tokens(args[0] if key is None else kwargs.get(key)).detach().requires_grad_())
        return ((starts[-1], *args[1:]), kwargs) if key is None else ((), {**kwargs, key: starts[-1]})

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        tokens = _tokens(first_tensor(output))
        means.append(tokens.mean(1 - of_images, keepdim=True).expand_as(tokens))
        return replace_first(output, torch.cat(means, of_images)) if len(means) == len(blocks) else None

    with HookGroup(model) as group, torch.enable_grad():
        for name in blocks:
            group.forward_pre(name, begin, with_kwargs=True)
            group.forward(name, end)
        output = inputs.call(model)
        wanted: Target = target(torch.arange(len(inputs), device=inputs.x.device).repeat(len(blocks)))
        total = wanted.pick(output, len(inputs) * len(blocks))[0].sum()
    with HookGroup() as group:
        records = attention(total, group)[: len(blocks)]
        torch.autograd.grad(total, starts, allow_unused=True)
    found = [record.gradient for record in records]
    if len(found) != len(blocks) or any(gradient is None for gradient in found):
        raise MethodError(f"legrad must see the attention of each of the {len(blocks)} blocks, got {len(found)}")
    return [by_image(gradient, len(inputs)) for gradient in found if gradient is not None]


def first_keyword(module: nn.Module, kwargs: Mapping[str, Any]) -> str:
    """The keyword of the argument that a module would take first; the order of a call says nothing."""
    known = [name for name in inspect.signature(module.forward).parameters if name in kwargs]
    return next(iter([*known, *kwargs]), "")


def _tokens(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 3:
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise MethodError(
            f"legrad must have blocks that take and give tokens (N, T, D), got {shape}; use it for vision transformers "
            "(ViT, DeiT), and gradcam or layercam otherwise"
        )
    return tensor
