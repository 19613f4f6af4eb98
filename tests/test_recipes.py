"""The recipes of CONTRIBUTING, followed in a copy of the package: two files, 40 lines each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

RECIPES = [
    ("a metric", "metrics/axioms.py", "TopShare"),
    ("a baseline", "baselines/replacements.py", "Median"),
    ("a target", "targets/classes.py", "Margin"),
    ("a perturbation method", "methods/score_cam.py", "ColumnDrop"),
]


def test_a_recipe_is_one_class_in_one_file_and_one_test(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "explain", tmp_path / "explain", ignore=shutil.ignore_patterns("__pycache__")
    )
    for thing, module, name in RECIPES:
        section = (
            (ROOT / "CONTRIBUTING.md")
            .read_text("utf-8")
            .split(f"## How to add {thing}\n")[1]
            .split("\n## ")[0]
        )
        code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
        assert len([line for line in code.splitlines() if line.strip()]) <= 40
        written, test = code.split("# The test", 1)
        imports, own = re.split(r"(?=^@)", written, maxsplit=1, flags=re.MULTILINE)
        with (tmp_path / "explain" / module).open("a", encoding="utf-8") as file:
            file.write(f"\n\n{own}")
        home = "explain." + module.removesuffix(".py").replace("/", ".")
        (tmp_path / f"of_{name.lower()}.py").write_text(
            f"{imports}\nfrom {home} import {name}\n# The test{test}"
        )
    command = "; ".join(f"import of_{name.lower()}" for _, _, name in RECIPES)
    ended = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
