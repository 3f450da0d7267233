"""The course's import path for the mathematical ops: every op as a function and as a class."""

from needle.op import OPS

from . import *  # noqa: F403

globals().update(OPS)
