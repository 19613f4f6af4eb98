"""Hooks on tensors, on the Nodes of the graph, and on what autograd does with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.autograd.graph import Node, register_multi_grad_hook

from explain._utils.errors import HookError
from explain.hooks.guard import call, guarded_one, several_gradients, site_of
from explain.hooks.handles import Handle, Hook, Hooks, Removable
from explain.hooks.registration import Plain, registering
from explain.hooks.saved_tensors import SavedTensors


class GraphHooks(Hooks):
    """The kinds of hooks that belong to one graph; they need no model, and act in any thread that runs backward."""

    def tensor(self, tensor: torch.Tensor, fn: Hook) -> Handle:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` has been computed; what it returns replaces it."""
        _must_require_grad(tensor)
        site = site_of(fn, _named(tensor), "gradient", ("gradient",))
        place = registering(tensor.register_hook, Plain(guarded_one(site, fn)))
        return self._add([site], [place], self._expect(site, fn))

    def leaf(self, leaf: torch.Tensor, fn: Hook, *, after: bool = False) -> Handle:
        """Call ``fn(gradient)`` before a leaf accumulates it; with ``after``, ``fn(leaf)`` when it has."""
        if not leaf.is_leaf:
            raise HookError("leaf must be a leaf of the graph, such as a parameter, got a computed tensor; use tensor")
        if not after:
            return self.tensor(leaf, fn)
        _must_require_grad(leaf)
        site = site_of(fn, _named(leaf), "after accumulation", ("leaf",))

        def accumulated(done: torch.Tensor) -> None:
            call(site, fn, done)

        place = registering(leaf.register_post_accumulate_grad_hook, Plain(accumulated))
        return self._add([site], [place], self._expect(site, fn))

    def tensors(self, tensors: Sequence[torch.Tensor], fn: Hook, *, mode: Literal["all", "any"] = "all") -> Handle:
        """Call ``fn(gradients)`` once all gradients are ready, or ``fn(gradient)`` once the first of them is."""
        site = site_of(fn, f"{len(tensors)} tensors", f"{mode} gradients", ("gradients",))
        for tensor in tensors:
            _must_require_grad(tensor)

        def ready(found: Any) -> None:
            call(site, fn, found, gradients=(found,) if isinstance(found, torch.Tensor) else found)

        def register() -> Removable:
            return register_multi_grad_hook(tuple(tensors), ready, mode=mode)

        return self._add([site], [register], self._expect(site, fn))

    def node(self, node: Node, fn: Hook) -> Handle:
        """Call ``fn(grad_inputs, grad_outputs)`` after a Node has run; what it returns replaces ``grad_inputs``.

        The Node that accumulates a leaf's gradient, which PyTorch drops together with its hooks when nothing holds it,
        is kept as long as the hook.
        """
        site = site_of(fn, f"Node {node.name()}", "after", ("grad_inputs", "grad_outputs"))

        def after(grad_inputs: Any, grad_outputs: Any) -> Any:
            found = call(site, fn, grad_inputs, grad_outputs, gradients=(*grad_inputs, *grad_outputs))
            return several_gradients(site, grad_inputs, found)

        return self._add([site], [lambda: _OnNode(node, node.register_hook(after))], self._expect(site, fn))

    def node_pre(self, node: Node, fn: Hook) -> Handle:
        """Call ``fn(grad_outputs)`` before a Node runs; what it returns replaces ``grad_outputs``."""
        site = site_of(fn, f"Node {node.name()}", "before", ("grad_outputs",))

        def before(grad_outputs: Any) -> Any:
            found = call(site, fn, grad_outputs, gradients=grad_outputs)
            return several_gradients(site, grad_outputs, found)

        return self._add([site], [lambda: _OnNode(node, node.register_prehook(before))], self._expect(site, fn))

    def after_backward(self, fn: Hook) -> Handle:
        """Call ``fn()`` once, when the backward pass that is running now is done; to be used from another hook."""
        site = site_of(fn, "the running backward pass", "at its end", ())
        switch = _Switch()

        def done() -> None:
            if switch.on:
                handle.remove()
                call(site, fn)

        def register() -> Removable:
            try:
                torch.autograd.Variable._execution_engine.queue_callback(done)
            except RuntimeError:
                raise HookError(
                    "after_backward() must be called while a backward pass runs; call it from a hook"
                ) from None
            return switch

        handle = self._add([site], [register])
        return handle

    def saved_tensors(self, pack: Hook, unpack: Hook) -> Handle:
        """Call ``pack(tensor)`` when autograd saves a tensor, and ``unpack(packed)`` when it needs the tensor back.

        It acts on what is computed by this thread until it is removed, in any thread and in any order with others.
        """
        packing = site_of(pack, "saved tensors", "pack", ("tensor",))
        unpacking = site_of(unpack, "saved tensors", "unpack", ("packed",))

        def register() -> Removable:
            return SavedTensors(lambda t: call(packing, pack, t), lambda packed: call(unpacking, unpack, packed))

        return self._add([packing], [register])


class _OnNode:
    """The handle of a hook on a Node. It keeps the Node alive where nothing else does."""

    def __init__(self, node: Node, handle: Removable) -> None:
        self._handle = handle
        self._node = node if node.name().endswith("AccumulateGrad") else None

    def remove(self) -> None:
        self._handle.remove()
        self._node = None


class _Switch:
    """A handle for a hook that cannot be removed, but can be switched off."""

    on = True

    def remove(self) -> None:
        self.on = False


def _named(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)}"


def _must_require_grad(tensor: torch.Tensor) -> None:
    if not tensor.requires_grad:
        raise HookError("tensor must require a gradient to be hooked, got one that does not; enable gradients first")
