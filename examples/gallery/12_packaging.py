"""
A model in one file
===================

``export_package`` writes a model, its code and its labels into one archive. The model
can be loaded where that code is not installed.
"""

# %%
# Only code in a module can be packed, so this tutorial writes a module first.

import importlib
import sys
import tempfile
from pathlib import Path

from explain.distributed.packaging import export_package, import_package
from explain.models import load

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

folder = tempfile.TemporaryDirectory()
Path(folder.name, "calibrated_network.py").write_text('''
from torch import nn

class Calibrated(nn.Module):
    """Divides the scores of another network by a temperature."""

    def __init__(self, network, temperature):
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, x):
        return self.network(x) / self.temperature
''')
sys.path.insert(0, folder.name)
tiny = load("tiny")
model = importlib.import_module("calibrated_network").Calibrated(
    tiny.model, tiny.temperature
)
sys.path.remove(folder.name)

# %%
# The report lists the contents of the archive.

archive = Path(folder.name, "packaged.pt")
report = export_package(model, archive, categories=tiny.categories)
print(report)

# %%
# Remove the module, and open the archive. This runs the code in it: open only archives
# that you trust.

del sys.modules["calibrated_network"], model
packaged = import_package(archive)
type(packaged.model)

# %%
# The loaded model is explained like any other.

import explain

explainer = explain.Explainer(packaged.model, packaged.categories, tiny.preprocess)
explainer(assets / "coffee.png").overlay(caption=True)

# %%

folder.cleanup()
