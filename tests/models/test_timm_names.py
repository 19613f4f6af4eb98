"""Names of timm's models, with and without a tag, by a stand-in for timm."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from explain import ModelError
from explain.models.from_timm import load_timm

TAGS = {"resnet18": "a1_in1k", "resnet18.a1_in1k": "a1_in1k", "resnet18.a2_in1k": "a2_in1k"}
GIVEN_UP = "resnet18_old"


def published(name: str) -> SimpleNamespace | None:
    """As timm has it: None for a name that it has given up, and an error for another tag."""
    if name == GIVEN_UP:
        return None
    if name not in TAGS:
        raise RuntimeError(f"Invalid pretrained tag ({name})")
    return SimpleNamespace(tag=TAGS[name], fixed_input_size=False)


@pytest.fixture(autouse=True)
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = SimpleNamespace(
        list_models=lambda include_tags: [name for name in TAGS if include_tags == ("." in name)],
        get_pretrained_cfg=published,
        create_model=lambda name, pretrained: nn.Linear(2, 2),
        data=SimpleNamespace(
            resolve_data_config=lambda options, pretrained_cfg, model: {},
            infer_imagenet_subset=lambda config: None,
        ),
    )
    monkeypatch.setitem(sys.modules, "timm", stand_in)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("resnet18", "resnet18.a1_in1k"),
        ("resnet18.a1_in1k", "resnet18.a1_in1k"),
        ("resnet18.a2_in1k", "resnet18.a2_in1k"),
    ],
)
def test_weights_are_named_by_architecture_and_tag(name: str, weights: str) -> None:
    assert load_timm(f"timm:{name}").weights == weights


@pytest.mark.parametrize(
    ("name", "meant"),
    [("resnet18.a3_in1k", "resnet18.a"), (GIVEN_UP, "resnet18"), ("resnet81", "resnet18")],
)
def test_a_name_or_tag_that_there_is_not_is_refused_in_a_line(name: str, meant: str) -> None:
    with pytest.raises(ModelError) as refused:
        load_timm(f"timm:{name}")
    message = str(refused.value)
    assert f"'timm:{name}' is unknown to timm" in message
    assert meant in message.rpartition(";")[2]
    assert "\n" not in message
