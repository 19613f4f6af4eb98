"""Edits of the parts of an attention, however it is written, against plain matrices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import HookError
from explain.hooks import Ablate, HookGroup, Steer, capture, intervene
from tests.conftest import in_threads
from tests.hooks.test_attention import (
    HEADS,
    LOGITS,
    MASK,
    MASKED,
    SCALE,
    SPELLINGS,
    Attention,
    in_windows,
    talking,
)
from tests.relevance.test_relevance import random

ONE_BY_ONE = ("fused_for_each_head", "one_by_one")
PARTS = ["q", "k", "v", "pattern", "heads"]


def by_vmap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * SCALE).softmax(-1) @ v

    return torch.vmap(torch.vmap(one_head))(q, k, v)


def scaled_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = (q.transpose(1, 2).contiguous() / 4).transpose(1, 2)
    return (q @ k.mT * (4 * SCALE)).softmax(-1) @ v


MORE = {function.__name__: function for function in (by_vmap, scaled_heads_last)}
SPELLINGS_AT_ONCE = {**SPELLINGS, **MORE}
Edit = Callable[[Tensor], Tensor]


def by_hand(model: Attention, x: Tensor, part: str, edit: Edit, *, mask: bool = False) -> Tensor:
    """The output with an edited part: an independent reference."""
    parts = dict(zip("qkv", model.parts(x), strict=True))

    def edited(name: str, tensor: Tensor) -> Tensor:
        return edit(tensor) if name == part else tensor

    q, k, v = (edited(name, tensor) for name, tensor in parts.items())
    scores = q @ k.mT * SCALE
    pattern = (scores.masked_fill(~MASK, -torch.inf) if mask else scores).softmax(-1)
    heads = edited("heads", edited("pattern", pattern) @ v)
    return model.out(heads.transpose(1, 2).flatten(2)).sin()


def without_head(head: int) -> Edit:
    return lambda tensor: torch.cat([tensor[:, :head], tensor[:, head:] * 0], 1)


@pytest.mark.parametrize("count", [1, 2, 3])  # 2 is the number of heads
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [name for name in SPELLINGS_AT_ONCE if name not in ONE_BY_ONE])
def test_a_head_is_ablated_however_attention_is_written(name: str, part: str, count: int) -> None:
    attention = Attention(SPELLINGS_AT_ONCE[name]).double()
    x = random(0, count, 5, 4).requires_grad_()
    sources = [x, *attention.parameters()]
    model = nn.Sequential(attention)
    with intervene(model, Ablate(f"0:{part}", heads=[1])):
        found = model(x)
    expected = by_hand(attention, x, part, without_head(1), mask=name in MASKED)
    assert_close(found, expected)
    assert not torch.allclose(found, model(x))
    for gradient, of_reference in zip(
        torch.autograd.grad(found.sum(), sources),
        torch.autograd.grad(expected.sum(), sources),
        strict=True,
    ):
        assert_close(gradient, of_reference)


def test_attention_that_one_thread_follows_is_none_of_anothers() -> None:
    """Another thread ablates a head while this one is inside of its own attention."""
    models = [nn.Sequential(Attention(SPELLINGS["einsum"]).double()) for _ in range(2)]
    x = random(0, 2, 5, 4)
    expected = [by_hand(model[0], x, "heads", without_head(1)) for model in models]
    found: list[Tensor] = []

    def ablated(number: int) -> Tensor:
        with intervene(models[number], Ablate("0:heads", heads=[1])):
            return models[number](x)

    inner = next(part for part in models[0][0].modules() if isinstance(part, nn.Linear))
    with inner.register_forward_hook(lambda *_: in_threads(1, lambda _: found.append(ablated(1)))):
        assert_close(ablated(0), expected[0])
    assert found
    for output in found:
        assert_close(output, expected[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "name", ["fused", "einsum", "merged_with_heads_first", "scaled_heads_last"]
)
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_the_same_in_every_spelling(name: str, part: str, mode: Callable) -> None:
    attention = Attention(SPELLINGS_AT_ONCE[name]).double()
    x = random(0, 3, 5, 4)
    direction = random(1, 5 if part == "pattern" else 3)
    model = nn.Sequential(attention)
    expected: list[Tensor] = []

    def steered(tensor: Tensor) -> Tensor:
        expected.append(tensor.detach())
        return tensor + direction

    reference = by_hand(attention, x, part, steered).detach()
    with mode(), intervene(model, Steer(f"0:{part}", direction)):
        assert_close(model(x), reference)
    with capture(model, f"0:{part}") as captured:
        model(x).sum().backward()
    assert_close(captured.activations[f"0:{part}"], expected[0])
    assert captured.gradients[f"0:{part}"].any()


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.clone().mul_(SCALE) @ k.mT).exp_()
    scores /= scores.sum(-1, keepdim=True)
    return scores @ v


@pytest.mark.parametrize("part", PARTS)
def test_what_is_overwritten_is_edited(part: str) -> None:
    attention = Attention(scaled_in_place).double()
    x = random(0, 3, 5, 4)
    model = nn.Sequential(attention)
    with torch.no_grad(), intervene(model, Ablate(f"0:{part}", heads=[1])):
        assert_close(model(x), by_hand(attention, x, part, without_head(1)))


def test_mixed_precision_may_cast_weights_once() -> None:
    attention = Attention(SPELLINGS["fused"])
    x = random(0, 3, 5, 4).float()
    model = nn.Sequential(attention)
    expected = attention.out.bias.sin().expand(3, 5, 4)
    with torch.autocast("cpu", torch.bfloat16), intervene(model, Ablate("0", heads=[0, 1])):
        for _ in range(2):
            assert_close(model(x).float(), expected, rtol=0.01, atol=0.01)


def test_a_layer_inside_a_transform_is_refused() -> None:
    model = nn.Sequential(Attention(SPELLINGS["fused"]).double())
    with pytest.raises(HookError, match="vmap"), intervene(model, Ablate("0", heads=[1])):
        torch.vmap(model)(random(0, 3, 1, 5, 4))


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_heads_that_are_computed_one_by_one_are_refused(name: str) -> None:
    model = nn.Sequential(Attention(SPELLINGS[name]).double())
    with pytest.raises(HookError, match="one by one"), intervene(model, Ablate("0", heads=[1])):
        model(random(0, 2, 5, 4))
    assert model(random(0, 2, 5, 4)).shape == (2, 5, 4)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All queries share the keys and values of one head."""
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def grouped_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part[:, :1].expand(-1, HEADS, -1, -1) for part in (k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


@pytest.mark.parametrize("function", [grouped, grouped_by_hand])
@pytest.mark.parametrize("part", ["q", "pattern", "heads"])
def test_heads_may_share_keys(part: str, function: Callable) -> None:
    attention = Attention(function).double()
    x = random(0, 3, 5, 4)
    q, k, v = attention.parts(x)
    zeroed = without_head(1)
    scores = (zeroed(q) if part == "q" else q) @ k[:, :1].mT * SCALE
    weights = scores.softmax(-1)
    heads = (zeroed(weights) if part == "pattern" else weights) @ v[:, :1]
    heads = zeroed(heads) if part == "heads" else heads
    expected = attention.out(heads.transpose(1, 2).flatten(2)).sin()
    model = nn.Sequential(attention)
    with intervene(model, Ablate(f"0:{part}", heads=[1])):
        assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_attention_is_edited() -> None:
    class Scripted(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5, -1), v)

    attention = Attention(torch.jit.script(Scripted())).double()
    x = random(0, 3, 5, 4)
    q, k, v = attention.parts(x)
    heads = without_head(1)((q @ k.mT * 0.5).softmax(-1) @ v)
    model = nn.Sequential(attention)
    expected = attention.out(heads.transpose(1, 2).flatten(2)).sin()
    for _ in range(3):  # scripts are optimised after two runs
        with intervene(model, Ablate("0", heads=[1])):
            assert_close(model(x), expected)


def test_heads_of_windows_are_told_apart() -> None:
    attention = Attention(in_windows).double()
    x = random(0, 3, 5, 4)

    def edited(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return in_windows(q, k, without_head(1)(v))

    model = nn.Sequential(attention)
    with intervene(model, Ablate("0:v", heads=[1])):
        found = model(x)
    attention.function = edited
    assert_close(found, model(x))


def test_mixed_heads_are_told_apart_or_refused() -> None:
    attention = Attention(talking).double()
    x = random(0, 3, 5, 4)
    model = nn.Sequential(attention)
    heads = without_head(1)(talking(*attention.parts(x)))
    expected = attention.out(heads.transpose(1, 2).flatten(2)).sin()
    with intervene(model, Ablate("0", heads=[1])):
        assert_close(model(x), expected)


class Given(nn.Module):
    """Attention that is given its heads: nothing says which are of one photo."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_heads_of_whom_nothing_is_known_are_refused() -> None:
    attention = Attention(Given()).double()
    x = random(0, 2, 5, 4)
    model = nn.Sequential(attention)
    ablate = Ablate("0.function", heads=[1])
    with pytest.raises(HookError, match="heads"), intervene(model, ablate):
        model(x)
    with intervene(model, Ablate("0.function:heads")):
        assert_close(model(x), attention.out.bias.sin().expand(2, 5, 4))


class Drawing(nn.Module):
    """A layer that counts its calls, and attention that drops weights at random."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += x.detach().sum()
        return self.attention(*3 * (self.norm(x),), need_weights=False)[0]


@pytest.mark.parametrize("training", [True, False])
def test_the_look_at_a_layer_leaves_nothing_behind(training: bool) -> None:
    x = random(0, 3, 5, 4).float()
    outputs = []
    states = []
    seen: list[str] = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Drawing()).train(training)
        model[0].norm.train()  # a normalisation may train inside a module that does not
        torch.manual_seed(1)
        seen.clear()
        with HookGroup(model) as group:
            group.forward("0.norm", lambda *_: seen.append("norm"))
            if hooked:
                group.forward("0:heads", lambda module, args, heads: seen.append("heads"))
            outputs.append(model(x))
        states.append([*model.state_dict().values(), torch.tensor(model[0].calls), torch.rand(1)])
        assert seen == ["norm", "heads"][: 1 + hooked]
    assert_close(*outputs)
    assert_close(*states)


def test_a_module_inside_an_attention_may_be_switched_alone() -> None:
    class WithDropout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout((x @ x.mT).softmax(-1)) @ x

    model = nn.Sequential(WithDropout()).eval()
    x = random(0, 3, 5, 4)
    seen: list[Tensor] = []
    with HookGroup(model) as group:
        group.forward("0:heads", lambda module, args, heads: seen.append(heads.detach()))
        outputs = [model(x)]
        model[0].dropout.train()
        outputs.append(model(x))
    assert_close([heads.reshape(x.shape) for heads in seen], outputs)


def test_hooks_inside_and_around_an_attention_see_what_is_edited() -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
    after = nn.Linear(4, 4).double()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layer
            self.after = after

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.attention(x, x, x, need_weights=False)[0])

    model = nn.Sequential(Block())
    x = random(0, 3, 5, 4)
    names = ["0:heads", "0.attention:pattern", "0.after:input"]
    edits = [Ablate("0.attention:pattern", heads=[0]), Ablate("0:heads", heads=[1])]
    with intervene(model, edits), capture(model, names) as captured:
        output = model(x)
        output.sum().backward()
    assert not captured.activations["0.attention:pattern"][:, 0].any()
    assert not captured.activations["0:heads"].any()
    assert_close(captured.activations["0.after:input"], layer.out_proj.bias.expand(3, 5, 4))
    assert_close(output, after(layer.out_proj.bias).expand(3, 5, 4))


def test_the_same_layer_takes_arguments_of_other_kinds() -> None:
    layer = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, weights: bool, causal: bool) -> Tensor:
            mask = LOGITS if causal else None
            return self.layer(x, x, x, need_weights=weights, attn_mask=mask)[0]

    model = Either()
    with torch.no_grad(), intervene(model, Ablate("layer", heads=[0, 1])):
        for count in (1, 3):
            for weights in (False, True):
                for causal in (False, True):
                    output = model(random(0, count, 5, 4), weights, causal)
                    assert_close(output, layer.out_proj.bias.expand(count, 5, 4))


class Changing(nn.Module):
    """Attention that is computed by other operations in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            x = x.sin()
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return (q @ k.mT).softmax(-1) @ v


def test_other_operations_than_those_that_were_seen_are_refused() -> None:
    model = nn.Sequential(Changing())
    with intervene(model, Ablate("0", heads=[1])):
        assert not model(torch.rand(2, 5, 4))[:, 1].any()
        with pytest.raises(HookError, match="same operations"):
            model(torch.rand(2, 5, 4))
    assert model(torch.rand(2, 5, 4)).requires_grad


@pytest.mark.long
def test_explanations_of_an_ablated_transformer_are_those_of_an_altered_one() -> None:
    from tests.methods.test_transformers import transformer

    x = random(0, 2, 3, 6, 6)
    model = transformer(fused=True)
    altered = transformer(fused=True)
    width = altered.head.in_features
    with torch.no_grad():
        altered.blocks[0].out.weight[:, width // 2 :] = 0  # of the second head
    for method in ("saliency", "gradcam", "rollout", "cheferattribution", "occlusion(window=3)"):
        options = {"layer": "blocks.0"} if method == "gradcam" else {}
        with intervene(model, Ablate("blocks.0", heads=[1])):
            found = explain.attribute(model, x, method, target=1, **options)
        expected = explain.attribute(altered, x, method, target=1, **options)
        assert_close(found.values, expected.values, rtol=1e-6, atol=1e-9)
