"""torch's initialisers under its path: `nn.init.xavier_uniform_(weight)`. See `needle.init`."""

from needle.init.in_place import *  # noqa: F403
from needle.init.in_place import __all__  # noqa: F401
