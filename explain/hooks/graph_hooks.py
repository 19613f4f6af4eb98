"""Hooks on tensors and on the Nodes of the graph."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import Node, register_multi_grad_hook

from explain._utils.errors import HookError
from explain.hooks.guard import GradientHook, call, site_of
from explain.hooks.handles import Handle, Hook
from explain.hooks.module_hooks import Hooks


class GraphHooks(Hooks):
    """The kinds of hooks that belong to one graph; they need no model, and act in any thread that runs backward."""

    def tensor(self, tensor: torch.Tensor, fn: Hook) -> Handle:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` has been computed; what it returns replaces it."""
        site = site_of(fn, _hookable(tensor), "gradient", ("gradient",))
        return self._add(site, tensor.register_hook, GradientHook(site, fn))

    def leaf(self, leaf: torch.Tensor, fn: Hook, *, after: bool = False) -> Handle:
        """Call ``fn(gradient)`` before a leaf accumulates it; with ``after``, ``fn(leaf)`` when it has."""
        if not leaf.is_leaf:
            raise HookError("leaf must be a leaf of the graph, such as a parameter, got a computed tensor; use tensor")
        if not after:
            return self.tensor(leaf, fn)
        site = site_of(fn, _hookable(leaf), "after accumulation", ("leaf",))

        def accumulated(done: torch.Tensor) -> None:
            call(site, fn, done)

        return self._add(site, leaf.register_post_accumulate_grad_hook, accumulated)

    def tensors(self, tensors: Sequence[torch.Tensor], fn: Hook, *, mode: Literal["all", "any"] = "all") -> Handle:
        """Call ``fn(gradients)`` once all gradients are ready, or ``fn(gradient)`` once the first of them is."""
        site = site_of(fn, f"{len(tensors)} tensors", f"{mode} gradients", ("gradients",))
        for tensor in tensors:
            _hookable(tensor)

        def ready(found: Any) -> None:
            call(site, fn, found, gradients=(found,) if isinstance(found, torch.Tensor) else found)

        return self._add(site, partial(register_multi_grad_hook, tuple(tensors), mode=mode), ready)

    def node(self, node: Node, fn: Hook) -> Handle:
        """Call ``fn(grad_inputs, grad_outputs)`` after a Node has run; what it returns replaces ``grad_inputs``.

        The Node that accumulates a leaf's gradient, which PyTorch drops together with its hooks when nothing holds it,
        is kept as long as the hook.
        """
        return self._on_node(node, node.register_hook, fn, "after", "grad_inputs", "grad_outputs")

    def node_pre(self, node: Node, fn: Hook) -> Handle:
        """Call ``fn(grad_outputs)`` before a Node runs; what it returns replaces ``grad_outputs``."""
        return self._on_node(node, node.register_prehook, fn, "before", "grad_outputs")

    def _on_node(self, node: Node, register: Callable[[Hook], Any], fn: Hook, direction: str, *takes: str) -> Handle:
        site = site_of(fn, f"Node {node.name()}", direction, takes)
        handle = self._add(site, register, GradientHook(site, fn))
        if node.name().endswith("AccumulateGrad"):
            handle.undo.insert(0, [node].clear)
        return handle

    def after_backward(self, fn: Hook) -> Handle:
        """Call ``fn()`` once, when the backward pass that is running now is done; to be used from another hook."""
        site = site_of(fn, "the running backward pass", "at its end", ())

        def done() -> None:
            if not handle.removed:  # such a hook cannot be removed, but passed over
                handle.remove()
                call(site, fn)

        handle = self._open([site])
        try:
            torch.autograd.Variable._execution_engine.queue_callback(done)
        except RuntimeError:
            handle.remove()
            raise HookError("after_backward() must be called while a backward pass runs; call it from a hook") from None
        return handle


def _hookable(tensor: torch.Tensor) -> str:
    """Return what messages call a tensor; refuse one that takes no hooks."""
    if not tensor.requires_grad:
        raise HookError("tensor must require a gradient to be hooked, got one that does not; enable gradients first")
    return f"a tensor of shape {tuple(tensor.shape)}"
