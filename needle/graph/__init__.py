"""The one graph of needle: nodes, symbolic recording, tracing, and GraphModule."""

from .graph import Dim, Graph, Node, map_structure
from .module import GraphModule, Mode, ModuleRecorder, symbolic
from .record import Recorder, Symbol, trace

__all__ = [
    "Dim",
    "Graph",
    "GraphModule",
    "Mode",
    "ModuleRecorder",
    "Node",
    "Recorder",
    "Symbol",
    "map_structure",
    "symbolic",
    "trace",
]
