"""needle models in Apache TVM: export to Relax, fusion, tuning, execution (see README.md)."""

from needle.exports import public

from .require import installed, require_tuning  # isort: skip  (first: it says what to install)

from .executable import TvmExecutable, compile
from .export import parameter_values, to_tvm_tensor
from .pipeline import build, functions, fuse, target_of
from .tuning import tune

__all__ = public(globals())
