"""PyTorch's own full-backward hooks, each for one call of a module.

`register_full_backward_hook` makes a `BackwardHook` for every call of its module, whoever makes it,
and does not tell the hook which call it acts for. Here the same object is made for the calls of one
thread, and the hook is chosen call by call. So it makes no difference which calls backward reaches,
in which order, and in which thread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from explain._utils.errors import LayerError
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import Where

FullBackwardHook: TypeAlias = Callable[[nn.Module, tuple[Any, ...], tuple[Any, ...]], Any]
"""A hook of a module, ``grad_input`` and ``grad_output``; what it returns replaces
``grad_input``."""
HookOfCall: TypeAlias = Callable[[nn.Module, Any, Sequence[torch.Tensor]], FullBackwardHook | None]
"""From a module, its output, and the tensors that backward must be asked for to reach the hook, to
the hook."""

INSTEAD = 'leave out gradients="full_backward"'
"""What to do where such hooks cannot be used: autograd needs none."""


def hook_calls(group: HookGroup, where: Where, hook_of: HookOfCall) -> None:
    """Put the full-backward hook that ``hook_of`` returns on each call of the selected modules.

    >>> layer, seen = nn.Linear(2, 1, bias=False), []
    >>> with HookGroup(layer) as group:
    ...     hook_calls(
    ...         group,
    ...         "",
    ...         lambda module, output, below: lambda *given: seen.append(given[1][0].shape),
    ...     )
    ...     layer(torch.ones(3, 2, requires_grad=True)).sum().backward()
    >>> seen
    [torch.Size([3, 2])]
    """
    running: list[tuple[BackwardHook, list[torch.Tensor]]] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> Any:
        hook = BackwardHook(module, [], [])
        running.append((hook, _with_gradient(args)))
        return hook.setup_input_hook(args)  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hook, below = running.pop()
        outputs = output if isinstance(output, tuple) else (output,)
        fn = hook_of(module, output, below or _with_gradient(outputs))
        if fn is None:
            return None
        hook.user_hooks.append(fn)
        return hook.setup_output_hook(output)  # type: ignore[no-untyped-call]

    group.forward_pre(where, enter)
    group.forward(where, leave)


def _with_gradient(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


@contextmanager
def refusing_in_place(layers: Sequence[str]) -> Iterator[None]:
    """Say in one line what PyTorch says of an in-place operation on a tensor that a full-backward
    hook is on.

    Raises:
        LayerError: there is one.
    """
    try:
        yield
    except RuntimeError as error:
        if "BackwardHookFunction" not in str(error):
            raise
        names = ", ".join(layers[:3]) + ", ..." * (len(layers) > 3)
        which = f"one of {names}" if len(layers) > 1 else names
        but = f"an in-place operation changes what {which} is given or returns; set inplace=False"
        raise LayerError(f"layers must suit full-backward hooks, but {but}, or {INSTEAD}") from None
