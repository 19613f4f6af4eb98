"""A training watched: photos explained every so many steps, gradients, and how maps moved.

store      the file of a run, with tables of the steps
asking     a fixed set of photos, and the question about them
board      TensorBoard
watch      `Watch`: for any loop
lightning  `callback`: the same for Lightning
moving     `film`: how the map of a photo moved
"""

from explain.watching.lightning import callback
from explain.watching.moving import Film, film
from explain.watching.watch import Watch

__all__ = ["Film", "Watch", "callback", "film"]
