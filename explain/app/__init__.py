"""The app: the report's own page with a live model behind it, in the browser of whoever started it.

    limits     how much is taken, kept and run
    uploads    photos that were sent: measured before they are decoded
    cache      photos and explanations in memory, the oldest forgotten
    scheduler  one task at a time on a model, quick ones between the parts of slow ones
    questions  what a request may hold, as values; a region that is covered
    answers    a request, answered step by step; curves and checks of a map
    service    models with what can be asked of them, photos, and the answers
    access     which requests are answered: hosts, origins, the token
    web        the page, addresses and replies; lines that reach the browser while the work goes on
    serving    an address to listen at, until it is interrupted

Nothing here imports Starlette or uvicorn before an app is made: they come with ``pip install 'explain[app]'``.
"""

from explain.app.web import application

__all__ = ["application"]
