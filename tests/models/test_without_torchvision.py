"""A torchvision that does not fit torch, or none: one line where it is needed, and no difference
where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import explain
from tests.conftest import ROOT

CAT = str(ROOT / "assets" / "chelsea.png")
ROADS = """
import contextlib, io, json, sys
import torch
import explain
from explain import cli, models
from explain import ModelError

photo, results = sys.argv[1], {}


def refused(make):
    try:
        make()
    except ModelError as error:
        return str(error)
    return "no error"


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, out.getvalue(), err.getvalue()


needing = {
    "by name": lambda: explain.Explainer("resnet18"),
    "with weights": lambda: explain.Explainer("resnet18", weights="none.pt"),
    "misspelt": lambda: models.load("resnet5"),
    "list": models.list_models,
    "timm": lambda: explain.Explainer("timm:resnet18"),
}
results["needing"] = {name: refused(make) for name, make in needing.items()}
results["commands needing"] = [command(photo, "--model", "resnet18"), command("models")]
layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 2)).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.linspace(0.1, 1, parameter.numel()).reshape(parameter.shape))
x = torch.linspace(0, 1, 300).reshape(1, 3, 10, 10)
results["values"] = explain.attribute(model, x, "gradcam", target=1).values.tolist()
own = explain.Explainer(model, preprocess=models.CenterCrop(24))(photo, "saliency")
bundled = explain.Explainer()(photo, ["gradcam", "guidedbackprop"])
results["predictions"] = bundled.predictions
results["files"] = [path.name for path in bundled.save("out") + own.save("own")]
results["versions"] = sorted(bundled.record()["versions"])
results["commands"] = [command(photo), command("methods"), command("layers")]
results["loaded"] = "torchvision" in sys.modules
print(json.dumps(results))
"""


def run_roads(folder: Path) -> dict[str, Any]:
    fakes = folder / "fakes"
    missing = "raise ModuleNotFoundError(\"No module named 'torchvision'\", name='torchvision')"
    for name, source in (("torchvision", missing), ("timm", "import torchvision")):
        (fakes / name).mkdir(parents=True)
        (fakes / name / "__init__.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(fakes), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ROADS, CAT],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.long
def test_what_needs_torchvision_says_so_in_a_line_and_the_rest_works(tmp_path: Path) -> None:
    results = run_roads(tmp_path)
    (line,) = set(results["needing"].values())
    assert line.startswith(
        f"torchvision cannot be used with torch {torch.__version__} (No module named 'torchvision'"
    )
    refused = f"explain: {line}\n"
    assert results["commands needing"] == [[2, "", refused], [1, "", refused]]
    assert not results["loaded"]
    here = explain.explain(CAT, "gradcam").predictions
    assert [label for label, _ in results["predictions"]] == [label for label, _ in here]
    assert torch.tensor(results["values"]).std() > 0
    assert len(results["files"]) == 10
    assert results["versions"] == ["explain", "numpy", "pillow", "python", "torch"]
    assert all(code == 0 and errors == "" for code, _, errors in results["commands"])
    photo, methods, layers = (printed for _, printed, _ in results["commands"])
    assert "wrote explained/chelsea-gradcam.png" in photo
    assert all(f"\n  {name} " in methods for name in explain.list_methods())
    assert "(default)" in layers
