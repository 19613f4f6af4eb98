"""Models that leave their process: ``explain.distributed.communication`` and
``explain.distributed.packaging``.

    communication    `communicate`: gradients exchanged between processes
    packaging        `export_package`: a model in one archive, with the code and labels to explain
                     it

Both work through hooks that live as long as their owner, a wrapped model or the writer of an
archive: no handle is left to remove, which is why they need not be in `explain.hooks`.
"""
