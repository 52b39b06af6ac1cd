"""The compiler: a graph and directives become a plan, verified between any two steps."""

from piper.compiler.compile import compile_graph
from piper.compiler.local import spec_bytes

__all__ = ["compile_graph", "spec_bytes"]
