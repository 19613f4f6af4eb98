"""The recipes of CONTRIBUTING, followed in a copy of the package: two files, 40 lines each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_readme import python

COMPARED = """
import explain, torch

layers = plain.layers_of(torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), seed=0)
x = torch.randn(3, 6, 5).double()
values = explain.attribute(plain.module_of(layers), x[None], "peakcam", target=1, layer="1").values
assert torch.allclose(values[0], peakcam(layers, x, 1, 1))
"""
"""What tests do with an entry of ``AS_THEY_ARE``."""
RECIPES = [
    ("a class activation map", "methods/cam.py", "PeakCAM"),
    ("a relevance rule", "relevance/linear_rules.py", "Sizes"),
    ("a command", "cli/lists.py", "list_all_baselines"),
    ("a metric", "metrics/axioms.py", "TopShare"),
    ("a target", "targets/classes.py", "Margin"),
    ("a perturbation method", "methods/score_cam.py", "ColumnDrop"),
]


@pytest.mark.long
def test_a_recipe_is_one_class_in_one_file_and_one_test(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "explain", tmp_path / "explain", ignore=ignored)
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for thing, module, name in RECIPES:
        section = page.split(f"## How to add {thing}\n")[1]
        code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
        assert len([line for line in code.splitlines() if line.strip()]) <= 40
        written, test = code.split("# The test", 1)
        imports, own = re.split(r"(?=^@)", written, maxsplit=1, flags=re.MULTILINE)
        home = "explain." + module.removesuffix(".py").replace("/", ".")
        needed = re.findall(r"^from explain\.\w+\.\w+ import .*$", imports, re.MULTILINE)
        needed = [line for line in needed if not line.startswith(f"from {home} ")]
        with (tmp_path / "explain" / module).open("a", encoding="utf-8") as file:
            file.write("\n".join(["", *needed, own]))
        compared = COMPARED if name == "PeakCAM" else ""
        (tmp_path / f"of_{name.lower()}.py").write_text(
            f"{imports}\nfrom {home} import {name}\n# The test{test}{compared}"
        )
    # a folder that Python is started in comes before all others
    python("; ".join(f"import of_{name.lower()}" for _, _, name in RECIPES), tmp_path)
