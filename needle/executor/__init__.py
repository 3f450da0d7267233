from .executable import Executable, compile
from .training import TrainingStep, compile_step

__all__ = ["Executable", "TrainingStep", "compile", "compile_step"]
