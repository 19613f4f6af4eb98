"""Whether anybody has hooks on a model."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as global_hooks

from explain.hooks.unwrap import modules_of


def has_hooks(model: nn.Module) -> bool:
    """Whether a forward pass of this model calls hooks, of its modules or of every module.

    >>> model = nn.Sequential(nn.ReLU())
    >>> handle = model[0].register_forward_hook(lambda *given: None)
    >>> has_hooks(model), handle.remove(), has_hooks(model)
    (True, None, False)
    """
    everywhere = (global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks)
    return any(everywhere) or any(m._forward_hooks or m._forward_pre_hooks for m in modules_of(model))
