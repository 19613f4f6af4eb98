"""Transformer blocks, each read out on its own: the score that the head gives to what one block returned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from explain._utils.errors import MethodError
from explain._utils.nested import first_tensor, replace_first
from explain.data.inputs import Inputs
from explain.hooks import HookGroup, untouched
from explain.hooks.attention import attention, by_image
from explain.layers.calls import grids_of, summary_of
from explain.relevance.propagation import sources_behind
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


def explained_blocks(model: nn.Module, inputs: Inputs) -> list[str]:
    """The blocks whose output depends on what is explained: those of the image's tower, not those of a text's.

    Found by a pass where there are several towers, and remembered. Of a network in which no gradient leads to the
    explained input, all blocks are taken.
    """
    names = transformer_blocks(model)
    if len({name.rpartition(".")[0] for name in names}) < 2:
        return names
    look = summary_of(model, inputs)
    if "blocks" not in look.chosen:
        look.chosen["blocks"] = _reached(model, inputs.first() if look.alone else inputs, names) or names
    found: list[str] = look.chosen["blocks"]
    return found


def _reached(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> list[str]:
    x, outputs = inputs.x.detach().clone().requires_grad_(), dict[str, torch.Tensor]()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            outputs[name] = tensor

    with untouched(model, grad=True), HookGroup(model) as group:
        for name in names:
            group.forward(name, partial(note, name))
        inputs.detached().replaced(x).call(model)
    reached = {name for name, tensor in outputs.items() if any(True for _ in sources_behind(tensor.grad_fn, [x]))}
    return [name for name in names if name in reached]


def attention_gradients(model: nn.Module, inputs: Inputs, target: Any) -> list[torch.Tensor]:
    """For each block, the gradient in its attention ``(N, heads, T, T)`` of the score read off its output.

    The output tokens are averaged, and take the place of every token on the way into what comes after the last block:
    whichever of them the network reads, it reads the mean. One forward pass does for all blocks, since the last one
    returns a batch with the outputs of all of them; each starts a graph of its own, so one backward pass does too.

    Raises:
        MethodError: the network has no such blocks.
    """
    blocks = explained_blocks(model, inputs)
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
        records = attention(total, group)
        torch.autograd.grad(total, starts, allow_unused=True)
    # A tower of texts has attention of its own, which no way to the blocks' inputs comes by.
    found = [record.gradient for record in records if record.gradient is not None][: len(blocks)]
    if len(found) != len(blocks):
        raise MethodError(f"legrad must see the attention of each of the {len(blocks)} blocks, got {len(found)}")
    return [by_image(gradient, len(inputs)) for gradient in found]


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
