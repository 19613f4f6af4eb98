"""Gradients by a walk over a recording, beside autograd's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from explain.recording import record
from explain.recording.gradients import reached_from, walk_back

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "amax": lambda x: x.amax(),
    "amax_of_equals": lambda x: x.round().clamp(-1, 1).amax((1, 3), keepdim=True) * x,
    "amax_over_rows": lambda x: x.amax(-2),
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "relu_in_place": lambda x: (2 * x).relu_(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "select": lambda x: x.select(2, 1) * x[:, :, -1],
    "cat": lambda x: torch.cat([x, x.sin(), 3 * x[:, :1]], 1),
    "cat_with_empty": lambda x: torch.cat([x, torch.zeros(0).to(x), x.cos()], 2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "layer_norm_with_weight": lambda x: F.layer_norm(x, x.shape[3:], x[0, 0, 0], x[0, 1, 0]),
    "softmax": lambda x: x.softmax(1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.cos(), x.sin()),
    "batch_norm": lambda x: F.batch_norm(x, torch.ones(2).to(x), torch.full((2,), 3.0).to(x)),
    "batch_norm_by_batch": lambda x: F.batch_norm(x, None, None, training=True),
    "convolution": lambda x: F.conv2d(x, x.transpose(0, 1)[:, :, :2, :2], stride=2, padding=1),
    "max_pool": lambda x: F.max_pool2d(x, 2, 1),
    "mean": lambda x: x.mean((1, 3)),
    "products": lambda x: (x @ x.transpose(2, 3)).sum() * (x.flatten(1) @ x.flatten(1).T),
    "product_with_sum": lambda x: torch.addmm(x[0, 0], x[0, 1], x[1, 0], beta=0.5, alpha=2),
    "difference": lambda x: torch.sub(x, x[:1], alpha=3),
    "product_with_number": lambda x: x * 2.5 * x[:, :1],
    "permute": lambda x: x.permute(3, -3, 0, 2).expand(2, 4, 2, 2, 4),
}


class Applied(nn.Module):
    """A network of one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_walk_gives_the_gradient_of_autograd(name: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    function = OPERATIONS[name]
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    result = function(x)
    arriving = torch.randn_like(result)
    (expected,) = torch.autograd.grad(result, x, arriving)
    recording = record(Applied(function), x)
    (source,) = recording.inputs
    (output,) = recording.outputs.values()
    signals = reached_from(recording.steps, [source])
    with torch.no_grad():
        found = walk_back(recording.steps, {output: arriving}, {source}, signals)
    torch.testing.assert_close(found[source], expected)
