"""Layers and containers."""

from needle.course.attention import AttentionLayer, MultiHeadAttention, Transformer, TransformerLayer
from needle.exports import public

from . import init
from .activation import *
from .attention import *
from .basic import *
from .containers import *
from .conv import *
from .embedding import *
from .functional import *
from .loss import *
from .module import *
from .norm import *
from .padding import *
from .pairs import *
from .pool import *
from .rearrange import *
from .recurrent import *
from .resize import *
from .transformer import *

__all__ = public(globals())
