"""`HookGroup`: hooks on modules, tensors and Nodes, for as long as a ``with`` block lasts."""

from explain._utils.errors import warn
from explain._utils.signals import SignalSafe, at_fork, unsplit
from explain.hooks.graph_hooks import GraphHooks
from explain.hooks.module_hooks import ModuleHooks
from explain.hooks.preserve import is_under_way


class HookGroup(SignalSafe["HookGroup"], ModuleHooks, GraphHooks):
    """Registers hooks, and removes all of them when the block ends, whatever ended it.

    Every method that registers a hook returns its `Handle`, to remove that hook alone. Hooks of one kind fire in the
    order in which they were registered. Hooks on modules are also reached by calls that other threads make of the same
    model; they ignore those calls. Hooks on tensors and Nodes belong to one graph and need no such guard; a group
    without a model takes these alone.

    A hook may return None, or a replacement for what it was given. One that takes the wrong arguments,
    returns the wrong number or shape of gradients, edits a gradient in place, or raises, is named in a `HookError`
    together with the layer and the direction.

    A copy of the model that is made meanwhile has none of the hooks. When a block ends without an error although some
    hook on modules, tensors or Nodes never fired, an `ExplainWarning` names it and says why. It does so only if there
    is a sign that something ran (another hook fired, autograd recorded operations, or a gradient was accumulated), and
    if no hook of the same function, or on the same place, fired either.

    Args:
        model: the model whose layers are hooked.

    Raises:
        HookError: a hook does not fit its place, or the group is closed. LayerError: a layer is not in the model.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    >>> shapes = []
    >>> with HookGroup(model) as group:
    ...     _ = group.forward(nn.ReLU, lambda module, args, output: shapes.append(output.shape))
    ...     _ = group.backward("0", lambda module, grad_input, grad_output: shapes.append(grad_output[0].shape))
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     print(group)
    HookGroup(Sequential), 2 hooks
      hook '<lambda>' on layer '1' (forward), fired
      hook '<lambda>' on layer '0' (backward), fired
    >>> shapes, len(model[1]._forward_hooks)
    ([torch.Size([1, 2]), torch.Size([1, 2])], 0)
    """

    def begin(self) -> "HookGroup":
        if is_under_way():
            _of_explanations.add(self)
        return self

    def end(self, error: BaseException | None) -> None:
        message = self.unfired_hooks_message() if error is None else None
        self.remove()
        if message is not None:
            warn(message)

    @unsplit
    def remove(self) -> None:
        """Remove every hook of the group, the latest first; calling it again does nothing.

        A group takes no hooks after that.
        """
        self._closed = True
        while self._handles:
            next(reversed(self._handles)).take_away()
        _of_explanations.discard(self)


_of_explanations: set[HookGroup] = set()


def _begin_child() -> None:
    """Remove the hooks of explanations in a process that has just been forked: these continue only in its parent."""
    for group in list(_of_explanations):
        group.remove()


at_fork(after_in_child=_begin_child)
