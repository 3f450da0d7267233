"""Every op as a function, and by `__getattr__` as a class; the classes live in the modules below."""

from types import FunctionType as _FunctionType
from typing import Any as _Any

import needle.ops.methods as _methods
import needle.ops.reduce.values as _values
from needle.autograd import axis_names as _axis_names
from needle.exports import public
from needle.op import OPS as _OPS

from .composed import *
from .fourier.complex import *
from .fourier.complex_functions import *
from .fourier.fft import *
from .fourier.frames import *
from .fused.attention import *
from .fused.layer import *
from .linalg.basic import *
from .linalg.determinants import *
from .linalg.einsum import *
from .linalg.grouped import *
from .linalg.lu import *
from .linalg.pseudo_inverse import *
from .linalg.solving import *
from .linalg.spectral import *
from .math.activation import *
from .math.arithmetic import *
from .math.bits import *
from .math.comparison import *
from .math.composed_activation import *
from .math.elementwise import *
from .math.finite import *
from .math.gamma import *
from .math.logic import *
from .math.maths import *
from .math.power import *
from .nn.attention import *
from .nn.binary_cross_entropy import *
from .nn.class_loss import *
from .nn.conv import *
from .nn.conv_nd import *
from .nn.cross_entropy import *
from .nn.ctc_loss import *
from .nn.embedding import *
from .nn.grid_sample import *
from .nn.heads import *
from .nn.image_parts import *
from .nn.layer_norm import *
from .nn.loss import *
from .nn.margin_loss import *
from .nn.norm import *
from .nn.pool import *
from .nn.pool_nd import *
from .nn.pool_places import *
from .nn.recurrent import *
from .nn.resize import *
from .nn.rotary import *
from .nn.sampling import *
from .pulled_back import *
from .reduce.basic import *
from .reduce.ranks import *
from .reduce.running import *
from .reduce.softmax import *
from .reduce.sorting import *
from .shape.basic import *
from .shape.counted import *
from .shape.creation import *
from .shape.drawn import *
from .shape.gather import *
from .shape.indexing import *
from .shape.join import *
from .shape.masked import *
from .shape.padding import *
from .shape.rearrange import *
from .shape.runtime_shape import *
from .shape.scatter import *


def __getattr__(name: str) -> _Any:
    """Op classes by name, as in the course: `ops.EWiseAdd`, `isinstance(t.op, ops.MatMul)`."""
    try:
        return _OPS[name]
    except KeyError:
        raise AttributeError(f"module 'needle.ops' has no attribute '{name}'") from None


abs = absolute
cat = concat
# By torch's names of arguments, `dim` and `keepdim`, too, and by the name that pickle finds.
_named = dict[_Any, _Any]()
for _name, _f in list(globals().items()):
    if isinstance(_f, _FunctionType) and _f is not public and _name[0] != "_":
        if _f not in _named:
            _named[_f] = _axis_names(_f)
            _named[_f].__module__, _named[_f].__qualname__ = __name__, _name
        globals()[_name] = _named[_f]


__all__ = public(globals())
