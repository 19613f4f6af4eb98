"""The small transformer: its file, its network against a plain computation, and the methods that
look at attention."""

from __future__ import annotations

import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import explain
from explain.models import Classifier, load
from explain.models.bundled import FILE, TRANSFORMER_FILE, TRANSFORMER_SHA256
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


def test_its_weights_and_labels(classifier: Classifier) -> None:
    assert not classifier.model.training
    assert all(p.dtype == torch.float32 for p in classifier.model.parameters())
    assert str(classifier.weights).endswith(f"(sha256 {TRANSFORMER_SHA256})")
    assert list(classifier.categories or ()) == list(load("tiny").categories or ())


def test_its_stem_is_that_of_the_small_model(classifier: Classifier) -> None:
    small = load("tiny").model.state_dict()
    own = {name: t for name, t in classifier.model.state_dict().items() if name in small}
    assert {name.split(".")[0] for name in own} == {"conv1", "bn1", "layer1", "layer2"}
    assert all(torch.equal(t, small[name]) for name, t in own.items())


def test_its_preprocessing_shows_the_whole_square(classifier: Classifier) -> None:
    photo = Image.effect_noise((96, 64), 60).convert("RGB")
    pixels = (
        torch.tensor(list(photo.crop((16, 0, 80, 64)).tobytes())).view(64, 64, 3).permute(2, 0, 1)
        / 255
    )
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.480, 0.448, 0.398), (0.277, 0.269, 0.282))
    )
    torch.testing.assert_close(classifier.preprocess(photo), (pixels - mean) / std)


def test_rollout_is_the_product_of_the_attention_that_the_formula_has(
    classifier: Classifier,
) -> None:
    with Image.open(CAT) as photo:
        x = classifier.preprocess(photo.convert("RGB"))[None]
    joint = torch.eye(65)
    for weights in plain(classifier.model, x)[1]:  # type: ignore[arg-type]
        joint = (0.5 * weights[0].mean(0) + 0.5 * torch.eye(65)) @ joint
    found = explain.attribute(classifier.model, x, "rollout")
    assert found.values.shape == (1, 8, 8)
    torch.testing.assert_close(found.values[0], joint[0, 1:].reshape(8, 8), atol=1e-5, rtol=1e-4)


METHODS = ["rollout", "legrad", "gradcam", "layercam", "saliency", "inputxgradient"]


def test_methods_find_the_grid_of_tokens() -> None:
    explanation = explain.Explainer(NAME)(CAT, METHODS)
    assert explanation.input_size == (64, 64)
    for name, found in explanation.attributions.items():
        side = 64 if name in ("saliency", "inputxgradient") else 8
        assert found.values.shape[-2:] == (side, side), name
        assert found.values.isfinite().all(), name
        assert found.heatmap.max() == 1, name


def test_the_whole_photo_is_padded_since_tokens_have_fixed_places() -> None:
    explanation = explain.Explainer(NAME, crop="whole")(CAT)
    assert explanation.input_size == (64, 64)


def test_the_card_says_what_was_measured() -> None:
    measured = json.loads(
        (ROOT / "examples" / "tiny_transformer" / "measured.json").read_text("utf-8")
    )
    assert measured["sha256"] == TRANSFORMER_SHA256
    assert measured["images"] == "10,000"
    assert float(measured["top-1"].removesuffix("%")) >= 38
    card = CARD.read_text("utf-8")
    for name, value in measured.items():
        assert f"| {name} | {value} |" in card, name


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The scripts that train the model, imported as they import each other, and forgotten
    afterwards."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "tiny_transformer"), *sys.path])
    yield {name: importlib.import_module(name) for name in ("prepare", "train", "export")}
    for name in set(sys.modules) - known:
        if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_what_is_exported_computes_what_was_trained(
    scripts: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = SmallTransformer(**scripts["export"].ARCHITECTURE)
    for block in model.layers:
        torch.nn.init.normal_(block.self_attention.in_proj_weight, std=0.3)  # so that places matter
    torch.nn.init.normal_(model.pos_embedding)
    mean = torch.rand(256)
    deviation = torch.rand(256) + 0.5
    torch.save(
        {"model": model.state_dict(), "mean": mean, "deviation": deviation},
        tmp_path / "checkpoint.pt",
    )
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        maps = (model.eval().features(x).flatten(2).transpose(1, 2) - mean) / deviation
        trained = scripts["train"].logits_of(model, maps)
        order = torch.stack([torch.randperm(64) for _ in x])
        moved = maps.gather(1, order[:, :, None].expand_as(maps))
        torch.testing.assert_close(
            scripts["train"].logits_of(model, moved, order), trained, atol=1e-4, rtol=1e-4
        )
        whole = scripts["export"].whole_network(tmp_path / "checkpoint.pt")
        torch.testing.assert_close(whole(x), trained, atol=1e-4, rtol=1e-4)
