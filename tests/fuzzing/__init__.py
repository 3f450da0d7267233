"""Searches for what is wrong in silence (README.md)."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # kinds may lie elsewhere, too: in another folder `fuzzing` on Python's path
