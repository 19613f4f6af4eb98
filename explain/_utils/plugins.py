"""Plug-ins: installed packages whose modules add methods, metrics, composites or commands."""

import threading
from importlib.metadata import entry_points

from explain._utils.errors import raised, warn

GROUP = "explain.plugins"
"""The entry points by which a package names its module."""

_lock = threading.RLock()
_begun: set[str] = set()


def load_plugins() -> None:
    """Import the modules of all plug-ins, once in a process; warns of one that fails. Takes some
    time, so only for unknown names and lists.
    """
    with _lock:  # other threads wait until all are there
        if GROUP in _begun:
            return
        _begun.add(GROUP)  # before they are loaded, as one of them may come here again
        for entry in entry_points(group=GROUP):
            try:
                entry.load()
            except Exception as error:  # whatever the code of others raises
                package = entry.dist.name if entry.dist is not None else entry.value
                warn(
                    f"plug-in {entry.name!r} of {package} cannot be loaded: {raised(error)}; "
                    "update or uninstall it"
                )
