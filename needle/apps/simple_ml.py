"""The course's `simple_ml`."""

from needle.training import *  # noqa: F403
