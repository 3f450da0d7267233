"""The public name of bridges/dynamo.py."""

import sys

from .bridges import dynamo

sys.modules[__name__] = dynamo
