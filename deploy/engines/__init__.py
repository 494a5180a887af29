"""Real engines on this machine: built from pinned parts, started, used, hurt, stopped.

``python -m deploy.engines --help`` is the way in, ``make engines`` runs all of it.
"""
