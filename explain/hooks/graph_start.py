"""Where the graph begins in a pass that autograd does not record: at the input of what computes the layer's output.

A graph that starts at the output would be too late: what the layer itself computes from its output (a pooled second
output, a tensor stored as an attribute) would have no history. So the last module that runs in a layer gets aliases of
its inputs that start a graph. In a container other than `nn.Sequential`, that module is unknown, and the container
itself gets them. Backward stops at the layer's output and never reaches the aliases.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as global_hooks

from explain._utils.nested import SwappedInputs, edit, paths
from explain.hooks.graph import alias, is_alias, try_continue_from
from explain.hooks.group import HookGroup, InputSwap
from explain.hooks.unwrap import modules_of

_PASSING_ON = (nn.Identity, nn.modules.dropout._DropoutNd)


class GraphStart:
    """Begins a graph at layers when they run, unless autograd records them already.

    With ``cut``, that may be while gradients are off, which are on from then; it happens once.
    """

    def __init__(self, *, cut: bool) -> None:
        self.cut = cut
        self.was_cut = False
        self.lost: list[str] = []
        """Layers of which parts of the gradient may be missing."""
        self._older: list[tuple[str, torch.Tensor, int]] = []
        self.starts: list[GradientEdge] = []
        """Where backward continues beyond the layers, so that the user's backward hooks on these fire."""

    def missing(self) -> list[str]:
        """The layers of which parts of the gradient may be missing.

        Among them are those with a tensor that was overwritten, and that has an older name than the one with a history.
        """
        if not self._older:
            return self.lost
        return self.lost + [layer for layer, tensor, version in self._older if tensor._version != version]

    def watch(self, group: HookGroup, layer: str, module: nn.Module, is_wanted: Callable[[], bool]) -> None:
        """Let the graph begin at a call of a layer, which is a module, when ``is_wanted`` says so."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> SwappedInputs | None:
            if not is_wanted() or not self.begin(module, args, kwargs):
                return None
            swapped = aliased_inputs((args, kwargs))
            hooked = global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks
            if hooked or any(m._backward_hooks or m._backward_pre_hooks for m in modules_of(module)):
                self.starts += [get_gradient_edge(other) for _, other in swapped.pairs]
            return swapped

        group.put_swap(_last_in(module), InputSwap(begin, partial(self.follow_overwritten, layer)))

    def begin(self, module: nn.Module, *inputs: Any) -> bool:
        """Turn gradients on where they are off and this is allowed; say whether a graph begins here."""
        if not torch.is_grad_enabled():
            return self.turn_on()
        if any(tensor.requires_grad for _, tensor in paths(inputs)):
            return False
        return not any(parameter.requires_grad for parameter in module.parameters())

    def turn_on(self) -> bool:
        """Turn gradients on, once; say whether this is allowed."""
        if not self.cut:
            return False  # the network itself has turned gradients off here
        self.cut = False
        self.was_cut = True
        torch.set_grad_enabled(True)  # the caller's mode comes back when `untouched` ends
        return True

    def follow_overwritten(self, layer: str, swapped: SwappedInputs | None, output: Any) -> Any:
        """Where a module overwrote an alias, let the tensor's history continue from the alias; return the output."""
        if swapped is None:
            return None
        names = {}
        for tensor, other in swapped.pairs:
            if any(view._base is other for _, view in paths(output)):  # it may be overwritten through these yet
                self._older.append((layer, tensor, tensor._version))
            if is_alias(other):
                continue  # nothing has overwritten it
            if try_continue_from(tensor, other):
                names[id(other)] = tensor
            else:
                self.lost.append(layer)
        return edit(output, lambda path, t: names.get(id(t), t)) if names else None


def aliased_inputs(inputs: Any) -> SwappedInputs:
    """Replace floating-point tensors by aliases of them."""
    return SwappedInputs(inputs, lambda t: alias(t) if t.is_floating_point() and not t.is_inference() else t)


def _last_in(module: nn.Module) -> nn.Module:
    """The module that computes the output of this one, as far as that is certain."""
    while getattr(type(module), "forward", None) is nn.Sequential.forward and "forward" not in vars(module):
        children = [child for child in module._modules.values() if child is not None]
        last = next((c for c in reversed(children) if c.training or not isinstance(c, _PASSING_ON)), None)
        if last is None:
            return module
        module = last
    return module
