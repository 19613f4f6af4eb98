"""Which image the values of a recording belong to, against plain perturbation: the values that
change with one image of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from explain.recording import Recording, Value, moves, record
from explain.recording.images import image_numbers, summed

Program = Callable[[Tensor], Tensor]
PROGRAMS: dict[str, Program] = {}
"""What networks do to images (N, 4, 4, 6), by name; none of them mixes images."""
HEADS = 2  # as many as images, in one of the tests
g = torch.Generator().manual_seed(0)
KERNEL, DEPTHWISE = (
    torch.randn(size, generator=g, dtype=torch.float64) for size in ((4, 4, 3, 3), (4, 1, 3, 3))
)
WEIGHT = torch.randn(4, 4, generator=g, dtype=torch.float64)
TABLE = torch.randn(5, 4, generator=g, dtype=torch.float64)


class Function(nn.Module):
    def __init__(self, function: Program) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)  # (N, 24, 4)


@program
def convolutions(x):
    h = F.conv2d(x, KERNEL, padding=1).relu()
    h = F.conv2d(h, DEPTHWISE, groups=4, padding=1)
    return F.max_pool2d(F.interpolate(h, scale_factor=2, mode="bilinear"), 3, 2, 1).mean((2, 3))


@program
def classifier(x):
    return (x.flatten(1) @ torch.ones(96, 7, dtype=x.dtype)).softmax(1)


@program
def attention_with_heads_before_images(x):
    t = tokens(x)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).permute(2, 0, 1, 3) for part in (t, t @ WEIGHT, t))
    q, k, v = (part.reshape(-1, 24, 2) for part in (q, k, v))
    heads = torch.bmm((q @ k.mT).softmax(-1), v).unflatten(0, (HEADS, -1))
    return heads.permute(1, 2, 0, 3).flatten(2)


@program
def attention_with_tokens_first(x):
    layer = nn.MultiheadAttention(4, HEADS).double()
    t = F.layer_norm(tokens(x).transpose(0, 1), (4,))
    return layer(t, t, t)[0].mean(0)


@program
def images_last(x):
    t = x.permute(1, 2, 3, 0)
    return torch.einsum("chwn,cd->dn", t, WEIGHT)


@program
def images_as_columns(x):
    return (TABLE @ x.flatten(1)[:, :4].mT).mT


@program
def windows_beside_each_other(x):
    windows = x.permute(0, 2, 3, 1).unflatten(2, (2, 3)).permute(2, 0, 1, 3, 4).reshape(-1, 12, 4)
    weights = (windows @ windows.mT).softmax(-1)
    return (weights @ windows).unflatten(0, (2, -1)).sum(0)


@program
def one_by_one(x):
    results = [torch.conv2d(image[None], KERNEL).amax((2, 3)) for image in x]
    return torch.cat([*results, torch.ones(1, 4, dtype=x.dtype)])[:-1]


@program
def written_one_by_one(x):
    result = torch.zeros(len(x), 3, 4, dtype=x.dtype)
    for i in range(len(x)):
        result[i, 0] = x[i].mean((1, 2))
        result[i, 1:] += x[i, :, :2, 0].mT
    return result.sum(1)


@program
def instance_norm(x):
    return F.instance_norm(x)


@program
def group_and_layer_norm(x):
    h = F.layer_norm(F.group_norm(x, 2), x.shape[2:])
    return F.batch_norm(h, torch.zeros(4, dtype=h.dtype), torch.ones(4, dtype=h.dtype))


@program
def class_tokens(x):
    t = torch.cat([TABLE[None, :1].expand(len(x), -1, -1), tokens(x)], 1)
    t = F.layer_norm(t + TABLE[0], (4,))
    return ((t @ t.mT).softmax(-1) @ t)[:, 0]


@program
def a_kernel_for_each_image(x):
    kernels = torch.einsum("nchw,cd->ndchw", x[:, :, :3, :3], WEIGHT).flatten(0, 1)
    h = F.conv2d(x.reshape(1, -1, *x.shape[2:]), kernels, groups=len(x))
    return h.view(len(x), 4, *h.shape[2:])


@program
def recurrent(x):
    layer = nn.LSTM(4, 3).double()
    return layer(x.flatten(2).permute(2, 0, 1))[0][-1]


@program
def recurrent_by_hand(x):
    state = torch.zeros(len(x), 4, dtype=x.dtype)
    for token in x.flatten(2).unbind(2):
        state = torch.tanh(F.linear(token, WEIGHT) + state @ WEIGHT)
    return state


@program
def vectors_of_a_table(x):
    nearest = torch.cdist(tokens(x), TABLE).argmin(-1)
    return F.embedding(nearest, TABLE).sum(1) + TABLE[nearest.T][0] + tokens(x).amax(1)


@program
def chosen_tokens(x):
    t = tokens(x)
    best = t.sum(-1).topk(3).indices
    chosen = t.gather(1, best[..., None].expand(-1, -1, 4))
    return chosen.sum(1) + t[torch.arange(len(x)), t.sum(-1).argmax(-1)]


@program
def added_at_indices(x):
    t = x.flatten(2)
    columns = torch.tensor([1, 2, 1])
    bins = torch.zeros(4, 3, len(x), dtype=x.dtype)
    images_last = t[..., :3].permute(1, 2, 0)
    bins = bins.index_put((torch.arange(4)[:, None], columns), images_last, accumulate=True)
    first = torch.zeros(4, 1, len(x), dtype=torch.long)
    return bins.scatter_add(1, first, images_last[:, :1])


@program
def fourier(x):
    return torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=x.shape[2:]).flatten(1)


@program
def sampled(x):
    places = torch.tanh(x[:, :2].permute(0, 2, 3, 1))
    return F.grid_sample(x, places, align_corners=False).flip(-1).roll(1, -1)


@program
def sorted_and_padded(x):
    h = F.pad(x, (1, 1, 1, 1), mode="reflect").sort(-1).values.cumsum(-1)
    return F.pad(F.pixel_shuffle(h, 2), (1, 0)) * (h.mean((1, 2, 3), keepdim=True) > 0)


@program
def two_views_of_each_image(x):
    both = torch.stack([x, x.flip(-1)], 1).flatten(0, 1)
    return F.conv2d(both, KERNEL).relu().unflatten(0, (-1, 2)).mean(1)


@program
def views_one_behind_the_other(x):
    both = torch.cat([x, x.flip(-1)])
    first, second = F.conv2d(both, KERNEL).relu().chunk(2)
    return first + second


def computed(recording: Recording, x: Tensor) -> dict[Value, Tensor]:
    """All values of a recording for another input."""
    tensors = {recording.inputs[0]: x}

    def tensor_of(value: Value) -> Tensor:
        computed = tensors.get(value)
        return value.tensor if computed is None else computed

    for step in recording.steps:
        tensors.update(step.run(tensor_of))
    return tensors


def changed(recording: Recording, x: Tensor) -> dict[Value, Tensor]:
    """For each image and value, which elements change with the image: (count, *shape)."""
    before = computed(recording, x)
    by_image = []
    for i in range(len(x)):
        other = x.clone()
        other[i] = torch.rand_like(x[i])
        by_image.append(computed(recording, other))
    return {value: torch.stack([t[value] != before[value] for t in by_image]) for value in before}


def check(function: Program, count: int, *, mixes: bool = False) -> None:
    x = torch.randn(count, 4, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        recording = record(Function(function), x)
        changes = changed(recording, x)
    rows = image_numbers(recording.steps, recording.inputs, count)
    for value, by_image in changes.items():
        if not by_image.any():
            continue
        numbers = rows[value]
        is_mixed = bool((by_image.sum(0) > 1).any())
        if numbers is None:
            is_shown = value.dtype.is_floating_point or value.dtype.is_complex
            assert is_mixed or mixes or not is_shown, value.step
            continue
        assert not is_mixed, value.step
        for i in range(count):
            wrong = by_image[i] & (numbers != i)
            assert not wrong.any(), value.step
    (output,) = recording.outputs.values()
    assert mixes or rows[output] is not None


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_belong_to_the_images_that_they_change_with(name: str, count: int) -> None:
    check(PROGRAMS[name], count)


def mixing(x: Tensor) -> Tensor:
    t = tokens(x)
    return F.batch_norm(x, None, None, training=True).mean() + torch.einsum("nqd,mkd->nm", t, t)


def test_mixed_images_are_not_attributed() -> None:
    check(mixing, 3, mixes=True)


def random_program(seed: int) -> Program:
    """A random order of moves and operations on tensors of changing shape; none mixes images."""

    def forward(x: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(seed)

        def number(end: int) -> int:
            return int(torch.randint(end, (), generator=draw))

        axis = 0  # that of the images; other axes are anything
        for _ in range(12):
            kind = number(9)
            d = number(x.ndim)
            if kind == 0:
                order = torch.randperm(x.ndim, generator=draw).tolist()
                x, axis = x.permute(order), order.index(axis)
            elif kind == 1 and d != axis and x.shape[d] % 2 == 0:
                x = x.unflatten(d, (2, -1))
                axis += d < axis
            elif kind == 2 and d != axis and d + 1 not in (axis, x.ndim):
                x = x.flatten(d, d + 1)
                axis -= d < axis
            elif kind == 3 and d != axis:
                x = torch.cat([x, x.flip(d) * 2, torch.zeros_like(x)], d).narrow(d, 1, x.shape[d])
            elif kind == 4 and d != axis:
                x = x.softmax(d) + x.cumsum(d).sin()
            elif kind == 5:
                x = torch.stack([part * 2 for part in x.unbind(d)], d)
            elif kind == 6 and x.ndim > 2:
                x = x.transpose(axis, -1).contiguous()
                shape = x.shape
                # beside all others, and back
                x = F.leaky_relu(x.reshape(-1, shape[-1])).view(shape).transpose(axis, -1)
            elif kind == 7 and d != axis and x.ndim > 3:
                x = x.mean(d)
                axis -= d < axis
            elif kind == 8 and d != axis:
                matrix = torch.linspace(-1, 1, x.shape[d] ** 2, dtype=x.dtype)
                matrix = matrix.view(x.shape[d], -1)
                x = (x.transpose(d, -1) @ matrix).transpose(d, -1)
        return x

    return forward


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed: int) -> None:
    check(random_program(seed), 2 + seed % 3)


def test_sums_leave_out_what_belongs_to_no_image() -> None:
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    numbers = torch.tensor([[0, 1, -1]])
    assert summed(values, numbers, 2).tolist() == [9.0, 18.0]


def test_indices_of_moves_go_to_the_device_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "compact", lambda numbers: numbers)  # reads them, as "meta" cannot
    order = torch.tensor([1, 0])
    (step,) = record(Function(lambda x: x.index_select(2, order)), torch.rand(1, 1, 2, 2)).steps
    devices = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket is torch.ops.aten.index_select:
                devices.extend(arg.device.type for arg in args if isinstance(arg, Tensor))
            return func(*args, **(kwargs or {}))

    with Seen():
        moves.moved(step, lambda value: torch.zeros(value.shape, device="meta"), device="meta")
    assert devices == ["meta", "meta"]
