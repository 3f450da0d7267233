"""The one graph of needle: nodes, symbolic recording, tracing, and GraphModule."""

from .counted import CountedRows
from .graph import Dim, Graph, Node
from .module import GraphModule, Mode, ModuleRecorder, symbolic
from .record import Recorder, Symbol, trace
from .structure import map_structure

__all__ = [
    "CountedRows",
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
