"""The recipes of CONTRIBUTING, followed in a copy of the package: two files, 40 lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("thing", "module", "name"),
    [
        ("a baseline", "baselines/replacements.py", "Median"),
        ("a target", "targets/classes.py", "Margin"),
        ("a perturbation method", "methods/path.py", "ColumnDrop"),
    ],
)
def test_a_recipe_is_one_class_in_one_file_and_one_test(thing: str, module: str, name: str, tmp_path: Path) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split(f"## How to add {thing}\n")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    written, test = code.split("# The test", 1)
    imports, own = re.split(r"(?=^@)", written, maxsplit=1, flags=re.MULTILINE)
    shutil.copytree(ROOT / "explain", tmp_path / "explain", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "explain" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n\n{own}")
    home = "explain." + module.removesuffix(".py").replace("/", ".")
    (tmp_path / "test_it.py").write_text(f"{imports}\nfrom {home} import {name}\n# The test{test}", "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
