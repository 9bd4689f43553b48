"""``python -m flashmap``: the command line without the console script."""

from flashmap.cli import app

app()
