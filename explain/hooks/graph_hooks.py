"""Hooks on tensors, on the Nodes of the graph, and on saved tensors.

PyTorch keeps the hooks on saved tensors of a thread on a stack, where only the last pair acts, and only the last one
can be removed. A pair that ends while others lie above it stays there without effect until they are removed.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.graph import Node, register_multi_grad_hook

from explain._utils.errors import HookError
from explain.hooks.guard import call, guarded, site_of
from explain.hooks.module_hooks import Handle, Hook, Hooks


class GraphHooks(Hooks):
    """The kinds of hooks that belong to one graph; they need no model, and act in any thread that runs backward."""

    def tensor(self, tensor: torch.Tensor, fn: Hook) -> Handle:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` has been computed; what it returns replaces it."""
        site = site_of(fn, _hookable(tensor), "gradient", ("gradient",))
        return self._add(site, tensor.register_hook, guarded(site, fn), fn)

    def leaf(self, leaf: torch.Tensor, fn: Hook, *, after: bool = False) -> Handle:
        """Call ``fn(gradient)`` before a leaf accumulates it; with ``after``, ``fn(leaf)`` when it has."""
        if not leaf.is_leaf:
            raise HookError("leaf must be a leaf of the graph, such as a parameter, got a computed tensor; use tensor")
        if not after:
            return self.tensor(leaf, fn)
        site = site_of(fn, _hookable(leaf), "after accumulation", ("leaf",))

        def accumulated(done: torch.Tensor) -> None:
            call(site, fn, done)

        return self._add(site, leaf.register_post_accumulate_grad_hook, accumulated, fn)

    def tensors(self, tensors: Sequence[torch.Tensor], fn: Hook, *, mode: Literal["all", "any"] = "all") -> Handle:
        """Call ``fn(gradients)`` once all gradients are ready, or ``fn(gradient)`` once the first of them is."""
        site = site_of(fn, f"{len(tensors)} tensors", f"{mode} gradients", ("gradients",))
        for tensor in tensors:
            _hookable(tensor)

        def ready(found: Any) -> None:
            call(site, fn, found, gradients=(found,) if isinstance(found, torch.Tensor) else found)

        return self._add(site, partial(register_multi_grad_hook, tuple(tensors), mode=mode), ready, fn)

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
        handle = self._add(site, register, guarded(site, fn), fn)
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

    def saved_tensors(self, pack: Hook, unpack: Hook) -> Handle:
        """Call ``pack(tensor)`` when autograd saves a tensor, and ``unpack(packed)`` when it needs the tensor back.

        It acts on what is computed by this thread until it is removed, in any thread and in any order with others.
        """
        packing = site_of(pack, "saved tensors", "pack", ("tensor",))
        unpacking = site_of(unpack, "saved tensors", "unpack", ("packed",))
        register = partial(SavedTensors, unpack=partial(call, unpacking, unpack))
        return self._add(packing, register, partial(call, packing, pack))


def _hookable(tensor: torch.Tensor) -> str:
    """Return what messages call a tensor; refuse one that takes no hooks."""
    if not tensor.requires_grad:
        raise HookError("tensor must require a gradient to be hooked, got one that does not; enable gradients first")
    return f"a tensor of shape {tuple(tensor.shape)}"


_stack = torch._C._autograd
_here = threading.local()


class SavedTensors:
    """A pair of hooks on this thread's stack, in effect until it is removed.

    What is packed while it is in effect is unpacked by it, also when it has ended.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._hooks, self._ended = (pack, unpack), False
        self._pair = (self._packed, lambda packed: packed[0](packed[1]))
        _drop_ended()
        self._below = _stack._top_saved_tensors_default_hooks(True)
        try:
            _stack._push_saved_tensors_default_hooks(*self._pair)
        except RuntimeError as error:
            raise HookError(f"saved_tensors() must be called where PyTorch allows it, but it says: {error}") from error
        _own().append(self)

    def remove(self) -> None:
        self._ended = True
        _drop_ended()

    def _packed(self, tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        hooks = self._below if self._ended else self._hooks
        if hooks is None:
            return _unchanged, (tensor.detach(), tensor._version)
        return hooks[1], hooks[0](tensor)


def _unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a tensor that was saved as it is; autograd leaves it to hooks to see whether it still is."""
    tensor, version = kept
    if tensor._version != version:
        words = "one of the variables needed for gradient computation has been modified by an inplace operation"
        raise RuntimeError(words)
    return tensor


def _own() -> list[SavedTensors]:
    """The pairs that this thread has put on its stack, the last one last."""
    return vars(_here).setdefault("pairs", [])  # type: ignore[no-any-return]


def _drop_ended() -> None:
    pairs = _own()
    while pairs and pairs[-1]._ended:
        top = _stack._top_saved_tensors_default_hooks(True)
        if top is None or top[0] != pairs[-1]._pair[0]:  # another pair, not of this package, is on top
            return
        _stack._pop_saved_tensors_default_hooks()
        pairs.pop()
