"""The commands, one function each. Importing this package registers all of them with the application.

A new command is one more function with `@app.command()`; its options come from `arguments`.
"""

from ..app import app

from . import pruning, training, measuring, sensitivities, attentions, saved, deploying, timings  # isort: skip  # the order of --help

__all__ = ["app", "attentions", "deploying", "measuring", "pruning", "saved", "sensitivities", "timings", "training"]
