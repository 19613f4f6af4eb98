"""Recordings of modules: their names and calls, functions with derivatives of their own, programs,
training, and networks of torchvision."""

from __future__ import annotations

import io
import threading

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import parametrizations

from explain._utils.errors import ArgumentError
from explain.recording import layer_names_of, record
from tests.recording.test_odd_networks import Small
from tests.recording.test_recording import assert_replays, images


class Clipped(torch.autograd.Function):
    """Rounded on the way forward, passed through on the way back."""

    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round() * step, x.sign()

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * 2, None


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.abs().sqrt_()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x):
        rounded, sign = Clipped.apply(self.conv(x), 0.25)
        return NewStyle.apply(rounded) + sign


def test_functions_with_a_derivative_of_their_own_are_one_step():
    model = Quantised().double()
    x = images().requires_grad_()
    recording = assert_replays(model, x, images(1))
    assert [step.name for step in recording.steps if step.has_gradient] == [
        "convolution",
        "Clipped",
        "NewStyle",
        "add",
    ]
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (replayed,) = torch.autograd.grad(recording.replay(x).sum(), x)
    torch.testing.assert_close(replayed, expected, rtol=1e-12, atol=1e-12)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
        self.again = self.block
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.block(self.again(x) + 1).mean((2, 3)))


def test_steps_know_their_module_and_which_of_its_calls_they_belong_to():
    recording = record(Shared(), images(dtype=torch.float32))
    seen = [
        (step.name, step.module, step.call) for step in recording.steps if step.name != "detach"
    ]
    assert seen == [
        ("convolution", "block.0", 0),
        ("relu", "block.1", 0),
        ("add", "", 0),
        ("convolution", "block.0", 1),
        ("relu", "block.1", 1),
        ("mean", "", 0),
        ("t", "head", 0),
        ("addmm", "head", 0),
    ]


class Parametrised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.head((self.norm(self.conv(x)) * self.scale).relu().mean((2, 3)))


@pytest.mark.parametrize("training", [False, True])
def test_the_replay_has_the_gradient_of_every_parameter(training):
    model = Parametrised().double().train(training)
    x = images()
    recording = record(model, x)
    parameters = dict(model.named_parameters())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replayed = torch.autograd.grad(recording.replay(x).sin().sum(), list(parameters.values()))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    expected = torch.autograd.grad(model(x).sin().sum(), list(parameters.values()))
    for name, one, other in zip(parameters, replayed, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)


def test_what_is_random_is_kept():
    class Random(nn.Module):
        def forward(self, x):
            noisy = F.dropout(x, 0.5) + torch.randn_like(x) + torch.dropout(x, 0.2, True)
            shuffled = noisy[..., torch.randperm(8)]
            return F.alpha_dropout(shuffled, 0.5, True).bernoulli_(0.5) + noisy + torch.rand_like(x)

    model = Random()
    torch.manual_seed(3)
    recording = record(model, images())
    for seed in (0, 1):
        torch.manual_seed(3)
        expected = model(images(seed))
        torch.manual_seed(4)
        torch.testing.assert_close(recording.replay(images(seed)), expected, rtol=1e-12, atol=1e-12)


def test_random_slopes_are_kept():
    class Random(nn.Module):
        def forward(self, x):
            return F.rrelu(x - 0.5, training=True) + F.rrelu(x - 0.5)

    torch.manual_seed(3)
    recording = record(Random(), images())
    torch.manual_seed(3)
    expected = Random()(images())
    torch.testing.assert_close(recording.output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(recording.replay(images()), expected, rtol=1e-12, atol=1e-12)


def test_rows_beyond_the_gradient_are_marked():
    class Cut(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                a = x.sin()
            return a + x.detach().cos() + x.exp()

    x = images().requires_grad_()
    recording = record(Cut(), x)
    has_gradient = {step.name: step.has_gradient for step in recording.steps}
    assert not has_gradient["sin"]
    assert has_gradient["exp"]
    (gradient,) = torch.autograd.grad(recording.replay(x).sum(), x)
    torch.testing.assert_close(gradient, x.exp().detach())


class Program(Small):
    def forward(self, x):
        h = F.relu(self.norm(self.conv(x)), inplace=True)
        h.narrow(1, 0, 1).add_(1)
        return self.head(F.max_pool2d(h, 2).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", ["scripted", "frozen", "traced", "exported", "fx", "decomposed"])
def test_programs_are_recorded_as_the_module_that_they_were_made_from(kind):
    model = Program().double().eval()
    x, other = images(), images(1)
    program = program_of(kind, model, x)
    for _ in range(3):  # programs are optimised in their first calls
        recording = record(program, x)
        torch.testing.assert_close(recording.replay(other), model(other), rtol=1e-12, atol=1e-12)
        assert any(step.name.endswith("convolution") for step in recording.steps)


def program_of(kind, model, x):
    """A program made from a module by one of PyTorch's tools."""
    if kind == "scripted":
        return torch.jit.script(model)
    if kind == "frozen":
        return torch.jit.freeze(torch.jit.script(model))
    if kind == "traced":
        return torch.jit.trace(model, x)
    if kind == "fx":
        return torch.fx.symbolic_trace(model)
    exported = torch.export.export(model, (x,))
    if kind == "decomposed":
        exported = exported.run_decompositions()
    if kind == "loaded":
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        exported = torch.export.load(file)
    return exported.module()


class Repeated(nn.Module):
    """A block that runs twice."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.block(self.block(x) + 1).mean((2, 3)))


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + self.inner(x * 2)


REPEATED = [
    ("convolution", "block.0"),
    ("relu", "block.1"),
    ("add", "add_0"),
    ("convolution", "block.0@1"),
    ("relu", "block.1@1"),
    ("mean", "mean_0"),
    ("addmm", "head"),
]


def layers_in(model, x):
    """The layer of each operation of a recording that computes."""
    names = layer_names_of(record(model, x))
    return [
        (step.name, name)
        for step, name in names.items()
        if step.name not in ("detach", "t", "permute")
    ]


@pytest.mark.parametrize("kind", ["exported", "decomposed", "loaded", "fx"])
def test_graphs_name_their_layers_as_the_module_that_they_were_made_from(kind):
    model, x = Repeated().eval(), images(dtype=torch.float32)
    assert layers_in(model, x) == REPEATED
    program = program_of(kind, model, x)
    assert layers_in(program, x) == REPEATED
    steps = layers_in(Twice(program), x)
    assert [name for _, name in steps if "block.0" in name] == [
        "inner.block.0",
        "inner.block.0@1",
        "inner.block.0@2",
        "inner.block.0@3",
    ]
    assert steps[-1] == ("add", "add_2")


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_layers_without_a_module_are_named_by_what_they_are(kind):
    model, x = Repeated().eval(), images(dtype=torch.float32)
    expected = ["convolution_0", "relu_0", "add_0", "convolution_1", "relu_1", "mean_0", "addmm_0"]
    program = program_of(kind, model, x)
    for _ in range(3):  # programs are optimised in their first calls
        assert [name for _, name in layers_in(program, x)] == expected
    inner = layers_in(Twice(program), x)
    assert inner[0] == ("convolution", "inner.convolution_0")
    assert len(set(inner)) == 2 * len(expected) + 2
    assert "convolution_1" in str(record(program, x))


class Containers(nn.Module):
    def forward(self, images, scale, *, mask):
        pair = images["a"] * scale, images["b"]
        return {"sum": [pair[0] + pair[1] * mask], "text": "none", "count": 3}


def test_containers_keywords_and_several_inputs():
    model = Containers()
    x, other, mask = images(0), images(1), images(2) > 0.5
    recording = record(model, {"a": x, "b": other}, torch.tensor(2.0), mask=mask)
    assert [value.shape for value in recording.inputs] == [x.shape, x.shape, (), x.shape]
    output = recording.replay(other, x, torch.tensor(3.0), ~mask)
    assert output["text"] == "none"
    torch.testing.assert_close(output["sum"][0], other * 3 + x * ~mask)
    with pytest.raises(ArgumentError, match="shapes"):
        recording.replay(other, x)


def test_what_leaves_the_record_is_named():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.Identity()

        def forward(self, x):
            return x / x.abs().max().item()

    class Chooses(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] > 1 else x

    assert record(Leaves(), images()).unseen
    assert not record(Chooses(), images()).unseen


def test_the_network_and_its_caller_stay_as_they_were():
    model = Program().eval()
    x = images(dtype=torch.float32).requires_grad_()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = x.detach().clone()
    record(model, x)
    assert torch.equal(x, before)
    assert x.grad is None
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_thread_is_not_recorded():
    model = Program().eval()
    x = images(dtype=torch.float32)

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, images):
            thread = threading.Thread(target=lambda: model(images * 2))
            thread.start()
            thread.join()
            return self.model(images)

    steps = [step.name for step in record(Waits(), x).steps]
    assert steps == [step.name for step in record(model, x).steps]


NETWORKS = [
    "resnet18",
    "mobilenet_v3_small",
    "densenet121",
    "efficientnet_b0",
    "swin_t",
    "vit_b_32",
]


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_torchvision(name):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).double().eval()
    for parameter in model.parameters():
        if not parameter.any():  # a head of zeros would hide everything
            nn.init.normal_(parameter, std=0.1)
    size = 224 if name.startswith("vit") else 64
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_replays(model, images(0, size=size), images(1, size=size))


def test_long_short_term_memory_and_attention_modules():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2
            )

        def forward(self, x):
            mask = torch.zeros(2, 24, dtype=torch.bool)
            return self.encoder(self.rnn(x.flatten(1, 2))[0], src_key_padding_mask=mask).mean(1)

    torch.manual_seed(0)
    model = Sequence().double().eval()
    x, other = (images(seed).requires_grad_() for seed in (0, 1))
    with_gradients = assert_replays(model, x, other, exact=False)
    with torch.no_grad():
        without = record(model, x)
    torch.testing.assert_close(without.output, with_gradients.output, rtol=1e-12, atol=1e-12)
    for recording in (with_gradients, without):
        names = {step.name for step in recording.steps}
        assert any("softmax" in name for name in names)
        assert not any("transformer" in name or "multi_head" in name for name in names)
