"""The search: the fastest strategies that fit, proven by bounds, with reasons for the others.

space (legal, canonical) -> bounds (memory, time) -> simulations, best bound first -> ranking, reasons
"""

from piper.search.candidate import DIMENSIONS
from piper.search.outcome import SearchResult
from piper.search.search import SearchRequest, search_strategies

__all__ = ["DIMENSIONS", "SearchRequest", "SearchResult", "search_strategies"]
