"""What is gone says in one line what replaces it, all from one table."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import explain
from explain._utils.spelling import moved_names
from explain.methods import KernelSHAP, Occlusion
from explain.methods.base import get_method
from explain.metrics import Deletion


@pytest.mark.parametrize(("name", "new"), moved_names().items())
def test_names_and_modules_that_are_gone(name: str, new: str) -> None:
    with pytest.raises(ImportError, match="use") as caught:
        importlib.import_module(f"explain.{name}")
    assert isinstance(caught.value, explain.ExplainError)
    assert new in str(caught.value)
    if "." not in name:
        assert not hasattr(explain, name)
        with pytest.raises(explain.ExplainError, match="use"):
            getattr(explain, name)
    else:
        room, own = name.split(".")
        assert not hasattr(importlib.import_module(f"explain.{room}"), own)
        with pytest.raises(explain.ExplainError, match="use"):
            getattr(importlib.import_module(f"explain.{room}"), own)


def test_from_imports_of_what_is_gone() -> None:
    for statement in (
        "from explain import fills",
        "from explain.fills import Photo",
        "from explain.targets import as_list",
    ):
        with pytest.raises(ImportError, match="gone"):
            exec(statement)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("explain.nonsense")


OPTIONS: list[tuple[Callable[..., Any], str, str]] = [
    (KernelSHAP, "runs", "samples"),
    (KernelSHAP, "until", "tolerance"),
    (KernelSHAP, "seconds", "max_seconds"),
    (Occlusion, "fill", "baseline"),
    (Deletion, "reading", "score"),
    (Deletion, "scoer", "score"),
    (lambda seconds: explain.attribute(torch.nn.Identity(), torch.rand(1, 3, 2, 2), "rise", seconds=seconds),  # type: ignore[call-overload]
     "seconds", "max_seconds"),
    (lambda runs: get_method(f"kernelshap(runs={runs})"), "runs", "samples"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "old", "new"), OPTIONS)
def test_options_that_are_gone_and_misspelt_ones(call: Callable[..., Any], old: str, new: str) -> None:
    with pytest.raises(explain.ExplainError, match=f"'{new}'"):
        call(**{old: 3})


def test_methods_are_copied_as_before() -> None:
    method = KernelSHAP(samples=3)
    assert copy.deepcopy(method) == pickle.loads(pickle.dumps(method)) == method
