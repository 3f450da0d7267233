"""The rules, one file per family. Importing this package registers them."""

from . import arithmetic, layers, neural, shapes

__all__ = ["arithmetic", "layers", "neural", "shapes"]
