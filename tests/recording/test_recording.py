"""A recording computes what the network computes, on the recorded input and on others."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.utils.checkpoint import checkpoint

from explain.recording import record

pytestmark = [
    # torch's own, while it compiles parts of a network
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
]

FORWARDS: dict[str, Callable[[Tensor], Tensor]] = {}
"""What networks do to an image (2, 3, 8, 8), by name."""


def forward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    FORWARDS[function.__name__] = function
    return function


@forward
def write_through_a_view_before_it_is_read(x):
    h = x.exp()
    whole = h.permute(0, 2, 3, 1)
    h[:, 1].relu_()
    h[:, 2].mul_(2)
    return whole[..., 1:].sum(-1)


@forward
def write_through_a_view_of_a_view(x):
    h = x * 2
    h.view(2, 3, 64)[:, :, ::2].view(2, 3, 4, 8)[..., 1:].add_(x[:, :, :4, 1:])
    return h


@forward
def write_into_the_input(x):
    x.mul_(2)
    x[:, 0] = 1
    return x.sin()


@forward
def write_after_reading(x):
    h = x * 2
    squared = h**2
    h.zero_()
    return squared + h + x


@forward
def read_an_overwritten_value_twice(x):
    h = x.sin()
    first = h.cos()
    h += 1
    second = h.cos()
    h *= 2
    return first * second * h


@forward
def memory_of_a_constant(x):
    result = torch.zeros(2, 5, dtype=x.dtype)
    result[:, 0] = x.mean((1, 2, 3))
    result[:, 1:3].add_(x[:, :2, 0, 0])
    return result


@forward
def empty_memory_filled_row_by_row(x):
    result = torch.empty_like(x)
    for row in range(8):
        torch.mul(x[:, :, row], row, out=result[:, :, row])
    return result


@forward
def out_argument(x):
    result = x.new_empty(x.shape)
    torch.add(x, x, alpha=2, out=result)
    return result * 3


@forward
def memory_with_gaps(x):
    h = torch.empty_strided((2, 3, 8, 8), (400, 100, 12, 1), dtype=x.dtype)
    h.fill_(1.5)
    h.copy_(x)
    h[0].mul_(2)
    return h.flatten(1)


@forward
def expanded_and_copied(x):
    return x.mean(1, keepdim=True).expand(2, 3, 8, 8).clone().mul_(x)


@forward
def channels_last(x):
    h = x.to(memory_format=torch.channels_last) * 2
    h[:, :, 2:4] += 1
    return h.view(2, 3, 64).relu_().reshape(2, -1) if h.is_contiguous() else h.relu_()


@forward
def indexed_write(x):
    h = x.clone()
    h[h > 0.5] = 0
    h[torch.tensor([1, 0])] += x
    h.index_add_(1, torch.tensor([0, 2]), x[:, :2])
    return h


@forward
def scattered(x):
    index = x.flatten(1).argsort(1)
    return torch.zeros_like(x).flatten(1).scatter_(1, index, x.flatten(1).cumsum(1))


@forward
def chosen(x):
    values, places = x.flatten(1).topk(5)
    return torch.where(x > x.mean(), x, x.abs()).flatten(1).gather(1, places) + values


@forward
def parts_and_lists(x):
    a, b = x.split([3, 5], -1)
    c, d = torch.unbind(x[:, :2], 1)
    return torch.cat([a.flatten(1), b.flatten(1)], 1).sum() + torch.stack([c, d])


@forward
def foreach(x):
    parts = [x[:, 0] * 2, x[:, 1] * 3]
    torch._foreach_add_(parts, 1.0)
    torch._foreach_mul_(parts, [part.clone() for part in parts])
    return torch.stack(torch._foreach_sqrt(parts))


@forward
def complex_numbers(x):
    spectrum = torch.fft.rfft2(x)
    spectrum.real.mul_(2)
    view = torch.view_as_real(spectrum)
    view[..., 1].neg_()
    return torch.fft.irfft2(spectrum * torch.complex(x[..., :5], x[..., 3:]), s=(8, 8))


@forward
def conjugated(x):
    numbers = torch.fft.fft(x)
    return (numbers.conj() * numbers).real


@forward
def other_shape_in_place(x):
    h = x * 1
    h.unsqueeze_(1).transpose_(1, 2).squeeze_(2)
    return h.sin_()


@forward
def past_autograd(x):
    h = x * 2
    h.data.mul_(3)
    return h + x.data


@forward
def other_data(x):
    h = x * 2
    h.data = x.detach() * 5
    return h * 3


@forward
def attention(x):
    tokens = x.flatten(2).transpose(1, 2)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    a = F.scaled_dot_product_attention(tokens, tokens * 2, tokens)
    b = F.scaled_dot_product_attention(tokens, tokens, tokens, is_causal=True)
    return a + b + F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=mask)


@forward
def statistics_of_the_batch(x):
    mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    h = F.batch_norm(x, mean, var, training=True)
    return F.instance_norm(h) * mean[:, None, None] + F.group_norm(h, 3) + F.layer_norm(x, (8,))


@forward
def mapped(x):
    return torch.vmap(lambda image: (image * image.mean()).relu(), randomness="same")(x)


@forward
def derivative_inside(x):
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return slope * x


@forward
def checkpointed(x):
    return checkpoint(lambda h: h.sin().relu_(), x * 2, use_reentrant=False)


@forward
def resized_and_sampled(x):
    h = F.interpolate(x, size=(11, 5), mode="bilinear")
    grid = F.affine_grid(
        torch.tensor([[[0.5, 0, 0.2], [0, 0.5, 0]]]).expand(2, 2, 3), (2, 3, 4, 4), False
    )
    return F.grid_sample(h, grid.to(h.dtype), align_corners=False).flatten(1)


@forward
def pooled(x):
    h = F.max_pool2d(x, 2, return_indices=True)[0] + F.avg_pool2d(x, 2)
    return (
        F.adaptive_avg_pool2d(F.unfold(h, 2).view(2, 4, 3, 9), 2)
        + F.adaptive_max_pool2d(h, 2)[:, :1]
    )


@forward
def numbers_and_types(x):
    return (x.float() * 2 + x.half()).double() + x.shape[0] * (x > 0.5) + x.argmax()


@forward
def write_through_a_conjugate(x):
    numbers = torch.fft.fft(x)
    numbers.conj().imag.mul_(3)
    numbers.imag.neg_()
    numbers[0].conj().mul_(2j)
    return numbers.real + 2 * numbers.imag


@forward
def write_through_pairs_of_reals(x):
    numbers = torch.complex(x, x * 2)
    torch.view_as_real(numbers).mul_(torch.tensor([2.0, 5.0]))
    return numbers.abs() + torch.view_as_real(numbers)[..., 1]


@forward
def chosen_by_the_values(x):
    return torch.cond(x.sum() > 192, lambda h: h.sin(), lambda h: h.cos() * 2, (x,))


@forward
def repeated_by_the_values(x):
    start = torch.tensor(0), x * 1.1
    return while_loop(lambda _, h: h.sum() > 100, lambda count, h: (count + 1, h.sin()), start)[1]


@forward
def scanned(x):
    return scan(lambda carry, h: (carry + h, carry * h), x[0] * 0, x)[1]


@forward
def derivatives_of_functions(x):
    slopes = torch.func.grad(lambda h: h.pow(3).sum())(x)
    rows = torch.func.vmap(torch.func.jacrev(lambda h: h.sin().sum(0)))(x).sum((1, 2))
    return slopes + rows + torch.func.jvp(torch.exp, (x,), (x,))[1]


@forward
def lists_at_once(x):
    sums = torch._foreach_add([x[0], x[1]], [x[1] * 2, x[0]])
    torch._foreach_addcmul_(sums, [x[0], x[0]], [x[1], x[1]], 3)
    return torch.stack(torch._foreach_maximum(sums, 2.0))


@forward
def several_out_arguments(x):
    parts = [x.new_empty(2, 3, 8, 3), x.new_empty(2, 3, 8, 5)]
    torch.split_with_sizes_copy(x, [3, 5], 3, out=parts)
    values, places = torch.max(parts[0], 3, out=(x.new_empty(0), x.new_empty(0, dtype=torch.long)))
    return parts[1] + values[..., None] + places[..., None]


@forward
def sparse_product(x):
    matrix = (x[0, 0] * (x[0, 0] > 0.5)).to_sparse()
    return torch.sparse.mm(matrix, x[1, 0]) + x


@torch.library.custom_op("recorded::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("recorded::increase", mutates_args=("x",))
def increase(x: Tensor) -> None:
    x.add_(1)


@forward
def operators_of_libraries(x):
    h = doubled(x).sin()
    increase(h)
    return h


WITHOUT_GRADIENTS = {"empty_memory_filled_row_by_row", "out_argument", "several_out_arguments"}
"""Functions with ``out=`` run only under `torch.no_grad`."""


# torch loads its compiler to scan
def cases(names):
    return [pytest.param(n, marks=pytest.mark.long) if n == "scanned" else n for n in names]


class OneNetwork(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        with torch.set_grad_enabled(self.name not in WITHOUT_GRADIENTS):
            return FORWARDS[self.name](x)


def images(seed=0, dtype=torch.float64, size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(2, 3, size, size, generator=generator, dtype=dtype)


def assert_replays(model, x, other, exact=True):
    expected, expected_other = (model(tensor.clone()) for tensor in (x, other))
    recording = record(model, x)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(recording.output, expected.detach(), **tolerance)
    torch.testing.assert_close(recording.replay(x).detach(), expected.detach(), **tolerance)
    again = recording.replay(other)
    torch.testing.assert_close(again.detach(), expected_other.detach(), **tolerance)
    for value in recording.outputs.values():
        torch.testing.assert_close(value.tensor, expected.detach(), **tolerance)
    return recording


@pytest.mark.parametrize("name", cases(FORWARDS))
def test_the_recording_computes_what_the_function_computes(name):
    x, other = (images(seed).requires_grad_() for seed in (0, 1))
    assert_replays(OneNetwork(name), x, other, exact="attention" not in name)


@pytest.mark.parametrize("name", cases(FORWARDS))
def test_every_value_is_what_it_was_when_it_was_made(name):
    """Each step gives from the recorded values, kept or computed again, what it gave."""
    model = OneNetwork(name)
    # what torch imports when it first scans would take ten times as long in the recorded pass
    model(images().requires_grad_() * 1)
    recording = record(model, images())
    for step in recording.steps:
        for value, tensor in step.run(lambda value: value.tensor).items():
            torch.testing.assert_close(tensor, value.tensor, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_steps_and_values_of_a_deep_network_are_shown_in_one_line_each():
    deep = nn.Sequential(*(nn.ReLU() for _ in range(300)))
    recording = record(deep, torch.rand(1, 2))
    assert len(recording.steps) == 300
    for step in recording.steps:
        assert repr(step) == f"{step.output!r} = {step.name}({step.inputs[0]!r})"
        assert re.fullmatch(r"%\d+ = \w+\(%\d+\)", repr(step))


OVERWRITTEN = {
    "write_after_reading",
    "write_through_a_view_before_it_is_read",
    "read_an_overwritten_value_twice",
}
"""Functions that overwrite what their own backward pass needs."""
NOT_COMPILED = {"chosen_by_the_values"}
"""Functions whose backward pass PyTorch refuses where it may not compile them."""
NAMED = {"past_autograd", "other_data", "scanned"}
"""Functions whose gradient a recording says that it misses."""
GRADIENTS = FORWARDS.keys() - WITHOUT_GRADIENTS - OVERWRITTEN - NOT_COMPILED


@pytest.mark.parametrize("name", cases(sorted(GRADIENTS)))
def test_the_replay_has_the_gradient_of_the_function_or_names_what_it_misses(name):
    x, other = images(0), images(1).requires_grad_()
    model = OneNetwork(name)
    recording = record(model, x)
    assert bool(recording.unseen) == (name in NAMED)
    if name in NAMED:
        return
    output = model(other * 1).abs().sum()
    replayed = recording.replay(other * 1).abs().sum()
    assert replayed.requires_grad == output.requires_grad
    if output.requires_grad:
        (expected,) = torch.autograd.grad(output, other)
        (gradient,) = torch.autograd.grad(replayed, other)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
