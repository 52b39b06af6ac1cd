"""Strategies: files and shorthand <-> directives; what a job and a model make of them.

text --parse--> Strategy --resolve(job)--> Resolved --complete(model)--> cut + directives
"""

from piper.strategy.complete import complete
from piper.strategy.degrees import require_plannable
from piper.strategy.files import parse_directive, write_directives
from piper.strategy.resolve import Resolved, resolve
from piper.strategy.shorthand import KEYS, Shorthand
from piper.strategy.strategy import Strategy, load_strategy

__all__ = [
    "KEYS",
    "Resolved",
    "Shorthand",
    "Strategy",
    "complete",
    "load_strategy",
    "parse_directive",
    "require_plannable",
    "resolve",
    "write_directives",
]
