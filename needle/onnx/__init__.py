"""needle models as ONNX files."""

from .export import to_onnx

__all__ = ["to_onnx"]
