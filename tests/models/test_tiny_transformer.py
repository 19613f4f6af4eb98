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
from torch.testing import assert_close

import explain
from explain.models import Classifier, load
from explain.models.bundled import FILE, TRANSFORMER_FILE
from explain.models.small_networks import SmallTransformer
from tests.conftest import ROOT

NAME = "tiny-transformer"
CAT = ROOT / "assets" / "chelsea.png"


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load(NAME)


def block_by_hand(
    state: dict[str, torch.Tensor], prefix: str, x: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of a transformer, by its formula: what it gives, and its attention."""
    part = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], part[f"{name}.weight"], part[f"{name}.bias"])

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ part[f"{name}weight"].T + part[f"{name}bias"]

    rows = linear("self_attention.in_proj_", norm("ln_1", x)).unflatten(-1, (3, heads, -1))
    query, key, value = rows.permute(2, 0, 3, 1, 4)
    seen = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    x = x + linear("self_attention.out_proj.", (seen @ value).transpose(1, 2).flatten(2))
    return x + linear("mlp.2.", F.gelu(linear("mlp.0.", norm("ln_2", x)))), seen


def plain(model: SmallTransformer, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The formula of the network behind its stem, and the attention of every block."""
    state = model.state_dict()
    maps = F.conv2d(model.features(x), state["conv_proj.weight"], state["conv_proj.bias"])
    tokens = [state["class_token"].expand(len(x), 1, -1), maps.flatten(2).mT]
    x = torch.cat(tokens, 1) + state["pos_embedding"]
    attention = []
    for i, block in enumerate(model.layers):
        x, seen = block_by_hand(state, f"layers.{i}.", x, block.self_attention.num_heads)
        attention.append(seen)
    x = F.layer_norm(x[:, 0], x.shape[2:], state["ln.weight"], state["ln.bias"])
    return x @ state["head.weight"].T + state["head.bias"], attention


@pytest.mark.parametrize("gradients", [True, False])
def test_the_network_computes_what_its_formula_says(gradients: bool) -> None:
    model = SmallTransformer(classes=3, side=24, stem=(4, 8, 8), width=12, heads=3, depth=2)
    for parameter in model.double().eval().parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.rand(2, 3, 24, 24, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        assert_close(model(x), plain(model, x)[0])


@pytest.mark.parametrize(("file", "most"), [(FILE, 8_000_000), (TRANSFORMER_FILE, 6_000_000)])
def test_the_files_are_small_and_safe(file: Path, most: int) -> None:
    assert file.stat().st_size <= most
    content = torch.load(file, weights_only=True)
    assert all(
        t.dtype == torch.float16 for t in content["state_dict"].values() if t.is_floating_point()
    )
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        modules = {pair[0] for pair in re.findall(rb"c([\w.]+)\n(\w+)\n", archive.read(name))}
    assert modules <= {b"torch", b"collections", b"torch._utils"}


def test_rollout_is_the_product_of_the_attention_that_the_formula_has(
    classifier: Classifier,
) -> None:
    with Image.open(CAT) as photo:
        x = classifier.preprocess(photo.convert("RGB"))[None]
    joint = torch.eye(65)
    for weights in plain(classifier.model, x)[1]:  # type: ignore[arg-type]
        joint = (0.5 * weights[0].mean(0) + 0.5 * torch.eye(65)) @ joint
    values = explain.attribute(classifier.model, x, "rollout").values
    assert_close(values, joint[0, 1:].reshape(1, 8, 8), atol=1e-5, rtol=1e-4)
