"""The course's import path for the mathematical ops."""

from . import *  # noqa: F403
