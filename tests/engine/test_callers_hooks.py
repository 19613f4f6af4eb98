"""Explanations that are made while hooks of the caller's are on the model: records say so, and
repeating tells."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ExplainWarning
from explain.hooks import HookGroup


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.flip(1)


def made(folder: Path) -> tuple[explain.Explainer, str]:
    path = folder / "photo.png"
    Image.effect_noise((40, 30), 60).convert("RGB").save(path)
    return explain.Explainer("tiny"), str(path)


def saved(explainer: explain.Explainer, path: str, folder: Path) -> Any:
    return explain.load(
        explainer(path, "gradcam(relu=False)", 1, layer="layer2").save(folder, overwrite=True)[1]
    )


@pytest.mark.parametrize("grouped", [True, False])
def test_a_map_that_the_callers_hooks_altered_says_so_and_is_not_repeated_silently(
    tmp_path: Path, grouped: bool
) -> None:
    explainer, path = made(tmp_path)
    with HookGroup(explainer.model) as group:
        if grouped:
            group.forward("layer1", doubled)
            altered = saved(explainer, path, tmp_path / "altered")
        else:
            handle = explainer.model.get_submodule("layer1").register_forward_hook(doubled)
            altered = saved(explainer, path, tmp_path / "altered")
            handle.remove()
        if grouped:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                again = altered.repeat(explainer)
            torch.testing.assert_close(again.values, altered.values)
    (told,) = altered.record["explainer"]["hooks"]
    assert "layer1" in told
    assert "doubled" in told
    with pytest.warns(ExplainWarning, match="hooks"):
        altered.repeat(explainer)
    plain = saved(explainer, path, tmp_path / "plain")
    assert plain.record["explainer"]["hooks"] == []
    explainer.model.get_submodule("layer1").register_forward_hook(doubled)
    with pytest.warns(ExplainWarning, match="hooks"):
        plain.repeat(explainer)
