"""The public name of bridges/relax.py."""

import sys

from .bridges import relax

sys.modules[__name__] = relax
