"""Explanations that are made while hooks of the caller's are on the model: records say so, and
repeating tells."""

from __future__ import annotations

from contextlib import ExitStack
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


@pytest.mark.parametrize("grouped", [True, False])
def test_a_map_that_the_callers_hooks_altered_says_so_and_is_not_repeated_silently(
    tmp_path: Path, grouped: bool
) -> None:
    explainer = explain.Explainer("tiny")
    photo = tmp_path / "photo.png"
    Image.effect_noise((40, 30), 60).convert("RGB").save(photo)
    layer = explainer.model.get_submodule("layer1")

    def saved() -> Any:
        explanation = explainer(str(photo), "gradcam(relu=False)", 1, layer="layer2")
        return explain.load(explanation.save(tmp_path / "out", overwrite=True)[1])

    plain = saved()
    assert plain.record["explainer"]["hooks"] == []
    with HookGroup(explainer.model) as group, ExitStack() as stack:
        if grouped:
            group.forward("layer1", doubled)
        else:
            stack.enter_context(layer.register_forward_hook(doubled))
        altered = saved()
        (hook,) = altered.record["explainer"]["hooks"]
        assert "layer1" in hook
        assert "doubled" in hook
        if grouped:
            torch.testing.assert_close(altered.repeat(explainer).values, altered.values)
        with pytest.warns(ExplainWarning, match="hooks"):
            plain.repeat(explainer)
    with pytest.warns(ExplainWarning, match="hooks"):
        altered.repeat(explainer)
