from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx
from torch import nn
from torch.package.package_importer import PackageImporter

import explain
from explain import ExplainError, HookError, ModelError
from explain.distributed.packaging import export_package, import_package
from tests.conftest import settled, snapshot
from tests.test_processes import in_child

SOURCES = {
    "boxed_parts": """
        from torch import nn

        class Block(nn.Sequential):
            def forward(self, x):
                return super().forward(x) + x
    """,
    "boxed_net": """
        import io
        import numpy as np
        import torch.nn.functional as F
        from torch import nn
        import boxed_tracker
        from boxed_parts import Block

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 6, 3, padding=1)
                self.norm = nn.BatchNorm2d(6)
                self.block = Block(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1))
                self.fc = nn.Linear(6, 4)

            def forward(self, x):
                from boxed_late import pooled
                return self.fc(pooled(F.relu(self.block(F.relu(self.norm(self.conv(x)), inplace=True)))))

            def track(self):
                boxed_tracker.send("used")
    """,
    "boxed_late": "def pooled(x): return x.mean((2, 3))",
    "boxed_tracker": "def send(text): print(text)",
}
PATTERNS = {"mock": "boxed_tracker", "categories": ["cat", "Schäferhund", "猫", "\ud800"]}


class Script(nn.Identity):
    __module__ = "__main__"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the user's code, which can be forgotten again."""
    folder = tmp_path / "code"
    folder.mkdir()
    for name, source in SOURCES.items():
        lines = [line.removeprefix(" " * 8) for line in source.splitlines()]
        (folder / f"{name}.py").write_text("\n".join(lines), "utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys.modules["__main__"], "Script", Script, raising=False)
    yield folder
    for name in SOURCES:
        sys.modules.pop(name, None)


@pytest.fixture
def boxed(code: Path) -> nn.Module:
    model = settled(importlib.import_module("boxed_net").Net()).eval()
    model.norm.train()
    return model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def attributions(model: nn.Module, x: torch.Tensor, layer: str) -> list[torch.Tensor]:
    return [
        explain.attribute(model, x, name, layer=of_method).values
        for name, of_method in (("gradcam", layer), ("guidedbackprop", None))
    ]


def test_an_archive_explains_the_same_where_the_code_is_not(
    boxed: nn.Module, code: Path, out: Path
) -> None:
    before = snapshot(boxed)
    report = export_package(boxed, out / "boxed", **PATTERNS)
    assert snapshot(boxed) == before
    assert report.interned == ("boxed_late", "boxed_net", "boxed_parts")
    assert report.mocked == ("boxed_tracker",)
    assert {"torch", "torch.nn", "torch.nn.modules.conv", "numpy", "io"} <= set(report.externed)
    assert set(report.versions) == {"explain", "torch", "python"}
    x = torch.randn(2, 3, 9, 8)
    values = attributions(boxed, x, "block")

    def elsewhere() -> Any:
        sys.path.remove(str(code))
        for name in SOURCES:
            sys.modules.pop(name, None)
        assert importlib.util.find_spec("boxed_net") is None
        packaged = import_package(out / "boxed")
        with pytest.raises(NotImplementedError, match=r"boxed_tracker\.send. was mocked out"):
            packaged.model.track()
        found = [each.numpy() for each in attributions(packaged.model, x, "block")]
        training = [module.training for module in packaged.model.modules()]
        return found, packaged.categories, str(packaged.report), training

    found, *rest = in_child(elsewhere)
    assert all(np.array_equal(one, other) for one, other in zip(found, values, strict=True))
    assert rest == [
        tuple(PATTERNS["categories"]),
        str(report),
        [module.training for module in boxed.modules()],
    ]


def test_the_users_own_callbacks_are_told_of_every_module(boxed: nn.Module, out: Path) -> None:
    told: dict[str, list[str]] = {"intern": [], "extern": [], "mock": []}
    plain = export_package(boxed, out / "plain", **PATTERNS)

    def note(exporter: Any, name: str, kind: str) -> None:
        told[kind].append(name)
        exporter.save_text("licences", f"{kind} {name}.txt", "free")

    hooks: Any = {f"on_{kind}": partial(note, kind=kind) for kind in told}
    report = export_package(boxed, out / "a", **hooks, **PATTERNS)
    assert report == plain
    assert {kind: tuple(sorted(names)) for kind, names in told.items()} == {
        "intern": report.interned,
        "extern": report.externed,
        "mock": report.mocked,
    }
    assert PackageImporter(str(out / "a")).load_text("licences", "intern boxed_late.txt") == "free"
    assert import_package(out / "a").report == report


def divides(exporter: Any, name: str) -> None:
    raise ZeroDivisionError(f"at {name}")


def with_lambda(net: nn.Module) -> nn.Module:
    net.act = lambda x: x
    return net


def with_class_of_the_script(net: nn.Module) -> nn.Module:
    return nn.Sequential(net, Script())


def with_forward_hook(net: nn.Module) -> nn.Module:
    net.block[0].register_forward_hook(print)
    return net


def with_gradient_hooks(net: nn.Module) -> nn.Module:
    net.register_full_backward_hook(print)
    net.fc.weight.register_hook(print)
    net.fc.weight.register_post_accumulate_grad_hook(print)
    return net


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (with_lambda, {}, "classes"),
        (with_class_of_the_script, {}, "'__main__' cannot be"),
        (with_forward_hook, {}, "remove"),
        (with_gradient_hooks, {}, "itself"),
        (lambda net: net, {"mock": "boxed_parts"}, "'boxed_parts' cannot be"),
        (lambda net: net, {"extern": "boxed_**"}, "extern must"),
        (lambda net: net, {"categories": "cat"}, "'cat'"),
        (lambda net: "net", {}, "nn.Module, got str"),
        (
            lambda net: net,
            {"on_mock": divides, **PATTERNS},
            r"^hook 'divides' on the modules of the archive \(mock\) raised ZeroDivisionError: at ",
        ),
        (lambda net: net, {"on_intern": lambda name: None}, r"must take \(exporter, name\), but"),
        (lambda net: net, {"on_extern": 3}, r"\(extern\) must be callable, got 3"),
    ],
)
def test_what_cannot_be_packaged_is_told_in_a_line_and_leaves_nothing(
    boxed: nn.Module, out: Path, spoil: Callable[[Any], Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(HookError, match=message):
        export_package(spoil(boxed), out / "a.pt", **options)
    assert list(out.iterdir()) == []


def damaged(data: bytes, path: Path) -> None:
    at = data.find(b"/.data/0.storage") + 100
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data, path: os.mkfifo(path), "pipe"),
        (lambda data, path: path.write_bytes(b""), "export_package"),
        (lambda data, path: path.write_bytes(data[: len(data) // 2]), "archive"),
        (damaged, "damaged"),
        (lambda data, path: torch.save({"a": 1}, path), "export_package"),
        (lambda data, path: path.mkdir(), "Is a directory"),
        (lambda data, path: None, "No such file"),
    ],
)
def test_what_is_no_whole_archive_is_refused(
    out: Path, spoil: Callable[[bytes, Path], Any], message: str
) -> None:
    model = nn.Linear(9, 9)
    export_package(model, out / "a.pt")
    spoil((out / "a.pt").read_bytes(), out / "b.pt")
    with pytest.raises(ModelError, match=message):
        import_package(out / "b.pt")


def test_an_archive_says_what_it_misses_and_cannot_be_packaged_again(
    boxed: nn.Module, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_package(boxed, out / "a.pt", extern="boxed_parts")
    with pytest.raises(HookError, match="archive"):
        export_package(import_package(out / "a.pt").model, out / "b.pt")
    monkeypatch.setitem(sys.modules, "boxed_parts", None)  # type: ignore[arg-type]
    with pytest.raises(ExplainError, match="needs code that is not installed"):
        import_package(out / "a.pt")
