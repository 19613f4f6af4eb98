"""Runs: all photos of a source explained, stored in one SQLite file that survives any interruption.

    labels          labels of photos as classes of the model
    preparing       from an entry to the model's input, in batches of one shape
    workers         the same ahead, in processes of a DataLoader
    job             what is asked of every photo of a source, and the answers as they are stored
    answers         the same for answers in words: a row for each word
    trackers        maps in FiftyOne, and in Weights & Biases
    exporting       a run as one table: Parquet, CSV and JSON lines
    parts           Parquet files that several machines write, imported into one SQLite file
    result          `Run`, and what can be made of it: overlays and pages of photos; `open_run`
    runner          `run`
    cluster         `run_on_ray`: on the machines of a Ray cluster

Sources of photos and the file of a run are in `explain.store`.
"""

from typing import TYPE_CHECKING

from explain._utils.errors import imported_later
from explain.store.sources import Content, Entry, Source

__all__ = ["Content", "Entry", "Source", "run_on_ray"]

if TYPE_CHECKING:
    from explain.runs.cluster import run_on_ray
else:
    # which needs all else
    __getattr__ = imported_later(__name__, {"run_on_ray": "explain.runs.cluster"})
