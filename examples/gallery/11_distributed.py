"""
Training in several processes
=============================

``DistributedDataParallel`` averages gradients between processes. You can choose how
they are sent, and measure it.
"""

# %%
# This tutorial uses a single process. ``examples/distributed.py`` starts two, and
# compares all communication hooks.

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from explain.distributed.communication import Codec, communicate

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
folder = tempfile.TemporaryDirectory()
dist.init_process_group(
    "gloo", init_method=Path(folder.name, "meeting").as_uri(), rank=0, world_size=1
)

# %%
# A codec encodes a bucket of gradients before it is sent, and decodes it afterwards.
# This one sends half precision. ``communicate`` returns a recorder of what was sent.

torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
)
recorder = communicate(
    model, Codec(lambda bucket: bucket.half(), lambda sent: sent.float())
)
for _ in range(3):
    model(torch.randn(8, 64)).square().mean().backward()
print(recorder)
print("sent:", sum(each.bytes_sent for each in recorder.buckets) / 1e6, "MB")

# %%
# Close the process group yourself.

dist.destroy_process_group()
folder.cleanup()
