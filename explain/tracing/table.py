"""The table of operations: what is known of PyTorch's functions by their names, for all who read a forward pass.

A function, a method, an operator and an in-place method that compute the same have one name, `operation_name`. What the
table does not list is an operation without a kind and without traits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Trait = Literal[
    "rectifies",  # lets positive values pass, by its name alone
    "linear",  # linear in its first argument, and no rule is needed
    "effect",  # does something besides computing, or cannot be repeated
    "query",  # tells something about a tensor
    "adds",  # a + b or a - b
    "adds to first",  # adds a product to its first argument
    "biased",  # adds a bias to what is linear in the input, or normalised
    "fills",  # takes nothing but the shape of its first argument
    "fits second",  # takes nothing but the shape or type of its second argument
    "reshapes",  # keeps the order of its first argument's values
    "moves",  # moves, repeats or selects values of its first argument
    "joins",  # concatenates or stacks tensors
    "reduces",  # combines the values along dimensions
    "keeps sign",  # makes no value negative, and none zero that is made of positive ones alone
    "monotone",  # does the same to all rows, with weights that are not negative
    "greater",  # compares a > b
    "less",  # compares a < b
    "casts",  # keeps the sign, in another type
    "negates",  # inverts a mask
    "masks",  # may keep what a mask says
]


@dataclass(frozen=True)
class OperationInfo:
    """One row: the kind of step in the words of composites, the arguments in order, and the traits.

    The bias of a ``biased`` operation runs along dimension ``channels``; None means the last dimensions.
    """

    name: str
    kind: str | None = None
    arguments: tuple[str, ...] = ()
    traits: frozenset[Trait] = frozenset()
    channels: int | None = None

    def has(self, trait: Trait) -> bool:
        return trait in self.traits


TABLE: dict[str, OperationInfo] = {}


def _add(names: str, kind: str | None, traits: str = "", arguments: str = "", channels: int | None = None) -> None:
    """One row for each name; traits are separated by commas."""
    found: Any = frozenset(trait.strip() for trait in traits.split(",") if trait)
    assert found <= set(get_args(Trait)), traits
    for name in names.split():
        assert name not in TABLE, name
        TABLE[name] = OperationInfo(name, kind, tuple(arguments.split()), found, channels)


for _n in (1, 2, 3):
    _add(f"conv{_n}d", "convolution", "biased", "input weight bias stride padding dilation groups", -_n - 1)
    _transposed = "input weight bias stride padding output_padding groups dilation"
    _add(f"conv_transpose{_n}d", "convolution", "biased", _transposed, -_n - 1)
    _add(f"max_pool{_n}d", "maximum", "keeps sign", "input kernel_size stride padding dilation ceil_mode")
    _add(f"adaptive_max_pool{_n}d", "maximum", "keeps sign", "input output_size")
    _add(f"avg_pool{_n}d adaptive_avg_pool{_n}d", "average", "keeps sign,monotone")
_STATISTICS = "input weight bias running_mean running_var"
_add("linear", "dense", "biased", "input weight bias")
_add("addmm", "dense", "adds to first", "input mat1 mat2")
_add("matmul rmatmul mm bmm mv einsum", "matrixproduct")
_add("baddbmm", "matrixproduct", "adds to first")
_add("addmv addbmm", None, "adds to first")
_add("batch_norm", "batchnorm", "biased", f"{_STATISTICS} training momentum eps", 1)
_add("instance_norm", "deviation", "biased", f"{_STATISTICS} use_input_stats momentum eps", 1)
_add("group_norm", "deviation", "biased", "input num_groups weight bias eps", 1)
_add("layer_norm", "deviation", "biased", "input normalized_shape weight bias eps")
_add("rms_norm", "deviation", "", "input normalized_shape weight eps")
_add("mul", "product", "masks")
_add("div divide true_divide truediv rtruediv rdiv itruediv", "quotient")
_add("add radd iadd", "sum", "adds,monotone")
_add("sub rsub isub subtract", "sum", "adds")
_add("addcmul", "sum", "adds to first")
_add("cat", "join", "joins,keeps sign,monotone", "tensors dim")
_add("stack", "join", "joins,monotone", "tensors dim")
_add("concat concatenate", "join", "joins,monotone")
_add("hstack vstack", None, "joins")
_add("where", "choice", "masks", "condition input other")
_add("masked_fill", "choice", "masks", "input mask value")
_add("setitem", None, "masks")
_add("relu leaky_relu prelu rrelu", "rectifier", "rectifies")
_add("abs", "rectifier")
_add("relu6 threshold hardtanh elu celu selu silu gelu hardswish mish softplus", "activation", "rectifies")
_add("sigmoid tanh hardsigmoid log_sigmoid softshrink hardshrink clamp clamp_max", "activation")
_add("exp erf sin cos pow square sqrt expm1 log1p atan", "activation")
_add("softmax", "softmax", "", "input dim")
_add("scaled_dot_product_attention", "attention", "", "query key value attn_mask dropout_p is_causal")
_add("mean", "average", "reduces,keeps sign,monotone")
_add("sum", "average", "reduces,monotone")
_add("amax", "maximum", "reduces", "input dim keepdim")
_add("amin", "maximum", "reduces")
_add("std var prod logsumexp norm", None, "reduces")
_add("view reshape flatten contiguous", None, "linear,reshapes,keeps sign,monotone")
_add("unflatten unsqueeze squeeze clone", None, "linear,reshapes,monotone")
_add("view_as reshape_as", None, "linear,reshapes,fits second")
_add("permute transpose movedim swapaxes t flip roll", None, "linear,moves,monotone")
_add("getitem split chunk unbind expand", None, "linear,moves,monotone")
_add("moveaxis swapdims adjoint rot90 select narrow tensor_split index_select", None, "linear,moves")
_add("repeat tile repeat_interleave", None, "linear,moves")
_add("expand_as", None, "linear,moves,fits second")
_add("T mT H", None, "moves")
_add("to type_as", None, "linear,casts,monotone,fits second")
_add("float double", None, "linear,casts,monotone")
_add("half bfloat16 type detach", None, "linear,casts")
_add("bool", None, "casts")
_add("logical_not invert bitwise_not", None, "negates")
_add("dropout", None, "linear,keeps sign,monotone")
_add("dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout", None, "linear,monotone")
_add("pixel_shuffle channel_shuffle", None, "linear,monotone")
_add("native_channel_shuffle pad", None, "monotone")
_add("pixel_unshuffle interpolate upsample gather take_along_dim masked_select diagonal as_strided", None, "linear")
_add("broadcast_to split_with_sizes hsplit vsplit dsplit unsafe_chunk unsafe_split unfold", None, "linear")
_add("cpu cuda alias identity copy neg positive cumsum tril triu", None, "linear")
_add("gt ge greater greater_equal", None, "greater")
_add("lt le less less_equal", None, "less")
_add("zeros_like ones_like full_like new_zeros new_ones new_full", None, "fills")
_add("retain_grad backward requires_grad resize stft istft", None, "effect")
_add("set", None, "effect,query")
_add("get delete size dim stride numel len repr hash element_size data_ptr untyped_storage", None, "query")
_add("is_contiguous is_floating_point is_complex is_view", None, "query")

LINEAR = ("convolution", "dense", "matrixproduct", "batchnorm")
"""The kinds of steps that are linear maps."""
KINDS = tuple(sorted({row.kind for row in TABLE.values() if row.kind is not None} | {"other"}))
"""The kinds of steps, as conditions of composites name them; operations without a kind are "other"."""
ALIASES = {
    "clip": "clamp", "clamp_min": "clamp", "max": "maximum", "fmax": "maximum", "min": "minimum", "fmin": "minimum",
    "multiply": "mul", "rmul": "mul", "imul": "mul",
}  # fmt: skip
RECTIFIER_NODES = {
    "PreluKernelBackward": "prelu",
    "RreluWithNoiseBackward": "rrelu",
    **{f"{n.title().replace('_', '')}Backward": n for n, row in TABLE.items() if row.has("rectifies")},
}
"""Rectifiers by the Nodes that they leave in the graph, whose names end in a number besides."""
SCALE_NODES = ("Sigmoid", "SignBackward", "Hardsigmoid", "Rsqrt", "Reciprocal", "Softmax")
"""Nodes whose results are gates, inverse deviations or weights of attention when something is multiplied by them."""
LAYOUT_NODES = (
    "View", "UnsafeView", "Unsqueeze", "Squeeze", "Expand", "Transpose", "Permute", "Clone", "Reshape", "Split",
    "Select", "Slice", "Unbind", "ToCopy", "T",
)  # fmt: skip
"""Nodes of operations that give the values of their input in another layout."""
SCORE_NODES = (
    "View", "UnsafeView", "Add", "Sub", "Mul", "Div", "MaskedFill", "Where", "Reshape", "Unsqueeze", "Squeeze",
)  # fmt: skip
"""Nodes of what is done to scores of attention before their softmax."""
_UNKNOWN = OperationInfo("")
_names: dict[Any, str] = {}


def info(name: str) -> OperationInfo:
    """The row of an operation; an empty one if it is unknown."""
    return TABLE.get(name, _UNKNOWN)


def operation_name(func: Any) -> str:
    """The name of the operation that a function does, however it is spelt.

    >>> import torch, torch.nn.functional as F
    >>> operation_name(F.relu), operation_name(torch.Tensor.relu_), operation_name(torch.clip)
    ('relu', 'relu', 'clamp')
    >>> operation_name(torch.Tensor.__mul__), info("mul").kind
    ('mul', 'product')
    """
    name = _names.get(func)
    if name is None:
        own = str(getattr(func, "__name__", "")).split(".")[0].strip("_")  # exported code calls "add.Tensor"
        name = ALIASES.get(own, own)
        if getattr(func, "__module__", None) != "__main__" and len(_names) < 4096:
            _names[func] = name
    return name
