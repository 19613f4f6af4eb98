"""The small transformer: its file, its network against a plain computation, and the methods that look at attention."""

from __future__ import annotations

import importlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import explain
from explain import ModelError, models
from explain.models import Classifier, load, tiny
from explain.models.small_transformer import SmallTransformer
from explain.models.tiny import TRANSFORMER_FILE, TRANSFORMER_SHA256
from tests.conftest import ROOT

NAME = "tiny-transformer"
CAT = ROOT / "assets" / "chelsea.png"
CARD = TRANSFORMER_FILE.with_name("TINY_TRANSFORMER.md")


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return load(NAME)


def plain(model: SmallTransformer, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The formula of the network behind its stem, one head after the other, and the attention of every block."""
    state, maps = model.state_dict(), model.features(x)
    tokens = torch.einsum("nchw,dc->nhwd", maps, state["conv_proj.weight"][:, :, 0, 0]) + state["conv_proj.bias"]
    tokens = tokens.reshape(len(x), -1, tokens.shape[-1])
    x = torch.cat([state["class_token"].expand(len(x), 1, -1), tokens], 1) + state["pos_embedding"]
    width, attention = x.shape[-1], []
    for i, block in enumerate(model.layers):
        part = {name.removeprefix(f"layers.{i}."): t for name, t in state.items() if name.startswith(f"layers.{i}.")}
        y = F.layer_norm(x, (width,), part["ln_1.weight"], part["ln_1.bias"])
        made = y @ part["self_attention.in_proj_weight"].T + part["self_attention.in_proj_bias"]
        heads, seen = [], []
        size = width // block.self_attention.num_heads
        for start in range(0, width, size):
            query, key, value = (made[..., k * width + start : k * width + start + size] for k in range(3))
            weights = (query @ key.transpose(1, 2) / size**0.5).softmax(-1)
            heads.append(weights @ value)
            seen.append(weights)
        attention.append(torch.stack(seen, 1))
        x = x + torch.cat(heads, -1) @ part["self_attention.out_proj.weight"].T + part["self_attention.out_proj.bias"]
        y = F.layer_norm(x, (width,), part["ln_2.weight"], part["ln_2.bias"])
        y = F.gelu(y @ part["mlp.0.weight"].T + part["mlp.0.bias"])
        x = x + y @ part["mlp.2.weight"].T + part["mlp.2.bias"]
    x = F.layer_norm(x[:, 0], (width,), state["ln.weight"], state["ln.bias"])
    return x @ state["head.weight"].T + state["head.bias"], attention


@pytest.mark.parametrize("gradients", [True, False])
def test_the_network_computes_what_its_formula_says(gradients: bool) -> None:
    model = SmallTransformer(classes=3, side=24, stem=(4, 8, 8), width=12, heads=3, depth=2).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.rand(2, 3, 24, 24, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(model(x), plain(model, x)[0])


def test_a_token_sees_the_pixels_around_its_own_place() -> None:
    model = SmallTransformer(classes=2, depth=1).eval()
    x = torch.rand(1, 3, 64, 64, requires_grad=True)
    model.features(x)[0, :, 3, 4].sum().backward()
    assert x.grad is not None
    rows, columns = (torch.nonzero(x.grad.abs().sum((0, 1)).sum(dim))[:, 0] for dim in (1, 0))
    # 8 pixels of its own, 7 before them and 4 behind, as the card says
    assert (rows.min(), rows.max()) == (3 * 8 - 7, 3 * 8 + 11)
    assert (columns.min(), columns.max()) == (4 * 8 - 7, 4 * 8 + 11)


def test_the_file_is_small_and_safe(classifier: Classifier) -> None:
    assert TRANSFORMER_FILE.stat().st_size <= 6_000_000
    content = torch.load(TRANSFORMER_FILE, weights_only=True)
    assert all(t.dtype == torch.float16 for t in content["state_dict"].values() if t.is_floating_point())
    with zipfile.ZipFile(TRANSFORMER_FILE) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    names = set(re.findall(rb"c([\w.]+)\n(\w+)\n", pickled))
    assert {pair for pair in names if pair[0] != b"torch"} <= {
        (b"collections", b"OrderedDict"),
        (b"torch._utils", b"_rebuild_tensor_v2"),
    }
    assert not classifier.model.training
    assert all(p.dtype == torch.float32 for p in classifier.model.parameters())
    assert str(classifier.weights).endswith(f"(sha256 {TRANSFORMER_SHA256})")
    assert list(classifier.categories or ()) == list(load("tiny").categories or ())


def test_its_stem_is_that_of_the_small_model(classifier: Classifier) -> None:
    small = load("tiny").model.state_dict()
    own = {name: t for name, t in classifier.model.state_dict().items() if name in small}
    assert {name.split(".")[0] for name in own} == {"conv1", "bn1", "layer1", "layer2"}
    assert all(torch.equal(t, small[name]) for name, t in own.items())


def test_its_name_is_known() -> None:
    assert models.TRANSFORMER == NAME
    assert models.list_models()[:3] == ["efficientnet-lite0", "tiny", NAME]
    with pytest.raises(ModelError, match=r"did you mean 'tiny-transformer'"):
        load("tiny-transformers")


def test_its_preprocessing_shows_the_whole_square(classifier: Classifier) -> None:
    photo = Image.effect_noise((96, 64), 60).convert("RGB")
    pixels = torch.tensor(list(photo.crop((16, 0, 80, 64)).tobytes())).view(64, 64, 3).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.480, 0.448, 0.398), (0.277, 0.269, 0.282)))
    torch.testing.assert_close(classifier.preprocess(photo), (pixels - mean) / std)


def test_other_sizes_are_refused() -> None:
    assert load(NAME, size=64).name == NAME
    with pytest.raises(ModelError, match="size must"):
        load(NAME, size=80)


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "weights.pt"
    monkeypatch.setattr(tiny, "TRANSFORMER_FILE", changed)
    with pytest.raises(ModelError, match="weights"):
        load(NAME)
    changed.write_bytes(TRANSFORMER_FILE.read_bytes()[:-1] + b"?")
    with pytest.raises(ModelError, match=rf"\(sha256 {TRANSFORMER_SHA256[:12]}…\), got .*; install explain again"):
        load(NAME)


def test_rollout_is_the_product_of_the_attention_that_the_formula_has(classifier: Classifier) -> None:
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


def test_it_knows_what_is_on_a_photo() -> None:
    assert explain.Explainer(NAME)(ROOT / "assets" / "coffee.png", "rollout").predictions[0][0] == "espresso"


def test_the_whole_photo_is_padded_since_tokens_have_fixed_places() -> None:
    explanation = explain.Explainer(NAME, crop="whole")(CAT)
    assert explanation.input_size == (64, 64)


def test_the_card_says_what_was_measured() -> None:
    measured = json.loads((ROOT / "examples" / "tiny_transformer" / "measured.json").read_text("utf-8"))
    assert measured["sha256"] == TRANSFORMER_SHA256
    assert measured["images"] == "10,000"
    assert float(measured["top-1"].removesuffix("%")) >= 38
    card = CARD.read_text("utf-8")
    for name, value in measured.items():
        assert f"| {name} | {value} |" in card, name


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The scripts that train the model, imported as they import each other, and forgotten afterwards."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "tiny_transformer"), *sys.path])
    yield {name: importlib.import_module(name) for name in ("prepare", "train", "export")}
    for name in set(sys.modules) - known:
        if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_what_is_exported_computes_what_was_trained(scripts: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SmallTransformer(**scripts["export"].ARCHITECTURE)
    for block in model.layers:
        torch.nn.init.normal_(block.self_attention.in_proj_weight, std=0.3)  # so that places matter
    torch.nn.init.normal_(model.pos_embedding)
    mean, deviation = torch.rand(256), torch.rand(256) + 0.5
    torch.save({"model": model.state_dict(), "mean": mean, "deviation": deviation}, tmp_path / "checkpoint.pt")
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        maps = (model.eval().features(x).flatten(2).transpose(1, 2) - mean) / deviation
        trained = scripts["train"].logits_of(model, maps)
        order = torch.stack([torch.randperm(64) for _ in x])
        moved = maps.gather(1, order[:, :, None].expand_as(maps))
        torch.testing.assert_close(scripts["train"].logits_of(model, moved, order), trained, atol=1e-4, rtol=1e-4)
        whole = scripts["export"].whole_network(tmp_path / "checkpoint.pt")
        torch.testing.assert_close(whole(x), trained, atol=1e-4, rtol=1e-4)


def test_the_schedule_rises_stays_and_falls_with_more_tokens_in_the_end(scripts: dict[str, Any]) -> None:
    train = scripts["train"]
    assert [train.rate(step, 1000, 200) for step in (0, 49, 99, 800, 900, 999)] == [0.01, 0.5, 1, 1, 0.5, 0.005]
    assert [train.kept(step, 1000, 200) for step in (0, 799, 800, 959, 960, 999)] == [16, 16, 32, 32, 64, 64]


def test_feature_maps_survive_as_bytes(scripts: dict[str, Any], tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 8, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    scripts["prepare"].write_features(pixels, tmp_path)
    features = scripts["train"].Features(tmp_path)
    stem, seen = scripts["prepare"].Stem(), load("tiny").preprocess
    maps = scripts["prepare"].run(stem, scripts["prepare"].as_input(pixels, seen)).flatten(2).transpose(1, 2)
    kept, places = features.plain(features.kept), np.tile(np.arange(64), (3, 1))
    error = (kept - maps).abs() / features.scale
    assert error.quantile(0.99) < 1 / 255
    assert torch.equal(features.batch(np.array([0, 1, 2]), places), features.normal(kept))


def test_classes_of_the_same_words_are_told_apart_by_their_order(scripts: dict[str, Any], tmp_path: Path) -> None:
    named = {
        "n03127747": "crash helmet", "n02012849": "crane", "n03126707": "crane", "n02013706": "limpkin, Aramus pictus",
    }  # fmt: skip
    (tmp_path / "wnids.txt").write_text("\n".join(named))
    (tmp_path / "words.txt").write_text("\n".join(f"{wnid}\t{words}" for wnid, words in named.items()))
    assert scripts["prepare"].imagenet_indices(tmp_path) == [518, 134, 517, 135]
