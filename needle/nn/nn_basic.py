"""The course's import path for the basic layers."""

from . import *  # noqa: F403
