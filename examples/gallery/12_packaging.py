"""
A model in one file
===================

``export_package`` writes a model to one archive, together with the code it is made of
and the labels of its classes. It opens where that code is not installed.
"""

# %%
# Code can only be packed if it is in a module. So this tutorial writes one to a
# folder first. Yours is there already.

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
# The report says what went into the archive.

archive = Path(folder.name, "packaged.pt")
report = export_package(model, archive, categories=tiny.categories)
print(report)

# %%
# Forget the module, and open the archive. This runs the code in it: open only
# archives that you trust.

del sys.modules["calibrated_network"], model
packaged = import_package(archive)
type(packaged.model)

# %%
# The model out of the archive is explained like any other.

import explain

explainer = explain.Explainer(packaged.model, packaged.categories, tiny.preprocess)
explainer(assets / "coffee.png").overlay(caption=True)

# %%

folder.cleanup()
