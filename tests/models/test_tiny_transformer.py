"""The small transformer: its file, its network against a plain computation, and the methods that
look at attention."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import explain
from explain.models import Classifier, load
from explain.models.bundled import FILE, TRANSFORMER_FILE
from explain.models.small_networks import SmallTransformer
from tests.conftest import ROOT

NAME = "tiny-transformer"
CAT = ROOT / "assets" / "chelsea.png"
CARD = TRANSFORMER_FILE.with_name("TINY_TRANSFORMER.md")


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load(NAME)


def block_by_hand(
    state: dict[str, torch.Tensor], prefix: str, x: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of a transformer, one head after the other: what it gives, and its attention."""
    part = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    width = x.shape[-1]
    mixed = []
    seen = []
    size = width // heads
    y = F.layer_norm(x, (width,), part["ln_1.weight"], part["ln_1.bias"])
    made = y @ part["self_attention.in_proj_weight"].T + part["self_attention.in_proj_bias"]
    for start in range(0, width, size):
        query, key, value = (
            made[..., k * width + start : k * width + start + size] for k in range(3)
        )
        seen.append((query @ key.transpose(1, 2) / size**0.5).softmax(-1))
        mixed.append(seen[-1] @ value)
    x = (
        x
        + torch.cat(mixed, -1) @ part["self_attention.out_proj.weight"].T
        + part["self_attention.out_proj.bias"]
    )
    y = F.layer_norm(x, (width,), part["ln_2.weight"], part["ln_2.bias"])
    y = F.gelu(y @ part["mlp.0.weight"].T + part["mlp.0.bias"])
    return x + y @ part["mlp.2.weight"].T + part["mlp.2.bias"], torch.stack(seen, 1)


def plain(model: SmallTransformer, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The formula of the network behind its stem, and the attention of every block."""
    state = model.state_dict()
    maps = model.features(x)
    tokens = (
        torch.einsum("nchw,dc->nhwd", maps, state["conv_proj.weight"][:, :, 0, 0])
        + state["conv_proj.bias"]
    )
    tokens = tokens.reshape(len(x), -1, tokens.shape[-1])
    x = torch.cat([state["class_token"].expand(len(x), 1, -1), tokens], 1) + state["pos_embedding"]
    attention = []
    for i, block in enumerate(model.layers):
        x, seen = block_by_hand(state, f"layers.{i}.", x, block.self_attention.num_heads)
        attention.append(seen)
    x = F.layer_norm(x[:, 0], x.shape[2:], state["ln.weight"], state["ln.bias"])
    return x @ state["head.weight"].T + state["head.bias"], attention


@pytest.mark.parametrize("gradients", [True, False])
def test_the_network_computes_what_its_formula_says(gradients: bool) -> None:
    model = (
        SmallTransformer(classes=3, side=24, stem=(4, 8, 8), width=12, heads=3, depth=2)
        .double()
        .eval()
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    x = torch.rand(2, 3, 24, 24, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(model(x), plain(model, x)[0])


@pytest.mark.parametrize(("file", "most"), [(FILE, 8_000_000), (TRANSFORMER_FILE, 6_000_000)])
def test_the_files_are_small_and_safe(file: Path, most: int) -> None:
    assert file.stat().st_size <= most
    content = torch.load(file, weights_only=True)
    assert all(
        t.dtype == torch.float16 for t in content["state_dict"].values() if t.is_floating_point()
    )
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read(
            next(name for name in archive.namelist() if name.endswith("data.pkl"))
        )
    names = set(re.findall(rb"c([\w.]+)\n(\w+)\n", pickled))
    assert {pair for pair in names if pair[0] != b"torch"} <= {
        (b"collections", b"OrderedDict"),
        (b"torch._utils", b"_rebuild_tensor_v2"),
    }


def test_rollout_is_the_product_of_the_attention_that_the_formula_has(
    classifier: Classifier,
) -> None:
    with Image.open(CAT) as photo:
        x = classifier.preprocess(photo.convert("RGB"))[None]
    joint = torch.eye(65)
    for weights in plain(classifier.model, x)[1]:  # type: ignore[arg-type]
        joint = (0.5 * weights[0].mean(0) + 0.5 * torch.eye(65)) @ joint
    attribution = explain.attribute(classifier.model, x, "rollout")
    assert attribution.values.shape == (1, 8, 8)
    torch.testing.assert_close(
        attribution.values[0], joint[0, 1:].reshape(8, 8), atol=1e-5, rtol=1e-4
    )
