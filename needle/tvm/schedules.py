"""The earlier path of `needle.course.tvm.schedules`."""

from needle.course.tvm.schedules import *  # noqa: F403
