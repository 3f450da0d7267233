from .executable import Executable, compile

__all__ = ["Executable", "compile"]
