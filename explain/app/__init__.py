"""The app: the report's own page with a live model behind it, in the browser of whoever started it.

    limits      how much is taken, kept and run
    uploads     photos that were sent: measured before they are decoded
    covering    a region of a photo, covered
    desk        photos and explanations, in memory, the oldest forgotten
    turns       whose turn it is: one at a time on a model, quick questions between the pieces of slow ones
    asking      what may be asked, as a value
    partial     a map that is not finished, as the page shows it
    work        work that somebody waits for, stopped or dropped
    answering   a question, answered step by step
    doubting    a question about a map that was given: curves, a check
    studio      models with what can be asked of them, photos, and the answers
    access      who may ask: hosts, origins, the token
    page        the page, made of the report's files and the app's own
    streams     lines that reach the browser while the work goes on
    web         addresses and replies
    serving     an address to listen at, until it is interrupted

Nothing here imports Starlette or uvicorn before an app is made: they come with ``pip install 'explain[app]'``.
"""

from explain.app.limits import Limits
from explain.app.service import Service
from explain.app.serving import LOOPBACK, address, listen
from explain.app.web import application

__all__ = [
    "LOOPBACK",
    "Limits",
    "Service",
    "address",
    "application",
    "listen",
]
