"""What tasks share while they run: links, processors, memory bandwidth."""

from simulator.sharing.sharing import Sharing

__all__ = ["Sharing"]
