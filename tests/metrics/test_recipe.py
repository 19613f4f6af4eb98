"""The recipe of CONTRIBUTING for a metric, followed in a copy of the package: two files and at most 40 lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_metric_is_one_class_in_one_file_and_one_test(tmp_path: Path) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## How to add a metric")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    imports, rest = code.split("@register\n", 1)
    metric, test = rest.split("# The test", 1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    shutil.copytree(ROOT / "explain", tmp_path / "explain", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "explain/metrics/complexity.py").open("a") as module:
        module.write("\n\n@register\n" + metric)
    names = (
        "from explain.metrics.complexity import TopShare\nassert explain.metrics.get_metric('topshare') == TopShare()\n"
    )
    (tmp_path / "test_topshare.py").write_text("import torch\nimport explain\n" + names + "# The test" + test)
    command = [sys.executable, "test_topshare.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "MetricResult" in imports
