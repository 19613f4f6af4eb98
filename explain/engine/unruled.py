"""Calls that no rule for relevance knows, and that have to be watched, since they may lose some of it."""

from __future__ import annotations

import types

from explain.engine.calls import Call

_LINEAR = """
    view reshape flatten unflatten permute transpose swapaxes swapdims movedim moveaxis t adjoint squeeze
    unsqueeze expand expand_as broadcast_to contiguous clone narrow select index_select getitem chunk split
    split_with_sizes tensor_split unbind hsplit vsplit dsplit repeat tile repeat_interleave roll flip rot90
    diagonal as_strided view_as reshape_as unfold to type type_as float double half bfloat16 cpu cuda detach
    alias identity dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout
    pixel_shuffle pixel_unshuffle channel_shuffle interpolate upsample neg positive gather take_along_dim
    masked_select copy cumsum tril triu unsafe_chunk unsafe_split
"""
_CONSERVING = frozenset(_LINEAR.split())
"""Linear functions that need not be watched."""
_EFFECTS = frozenset(["retain_grad", "backward", "requires_grad", "set", "resize", "stft", "istft"])
_LEFT_ALONE = _CONSERVING | _EFFECTS
_PLAIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_OPERATORS = frozenset(["pow", "ipow", "rpow", "rdiv", "rtruediv"])
"""What `Tensor` has in Python, around a function of its own."""
_WRITTEN = ("torch.functional", "torch.nn.functional")


def is_watched(call: Call) -> bool:
    """Whether a call is one of PyTorch's functions of tensors that may lose relevance, and can be made out of place."""
    function = call.function
    if (
        (call.in_place and call.apart() is None)
        or call.kind in _CONSERVING
        or call.kind in _EFFECTS
        or "out" in call.kwargs
    ):
        return False
    written = getattr(function, "__module__", None) in _WRITTEN or call.kind in _OPERATORS
    return written or isinstance(function, _PLAIN)
