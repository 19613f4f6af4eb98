"""The app: the report's page with a live model behind it, in the browser.

    uploads    limits of the app, and uploaded photos: measured before they are decoded
    cache      photos and answers in memory; the least recently used go first
    scheduler  one task at a time on a model, quick ones between the parts of slow ones
    requests   requests as validated values; photos with a covered region
    jobs       a request, answered step by step; curves and checks of a map
    service    models, photos and answers
    access     which requests are allowed: hosts, origins, the token
    web        the page, addresses and replies
    serving    a server at an address, until an interrupt

Nothing here imports Starlette or uvicorn before an app is made: they come with ``pip install 'explain[app]'``.
"""

from explain.app.web import application

__all__ = ["application"]
