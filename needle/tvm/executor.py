"""The earlier path of `needle.course.tvm.executor`."""

from needle.course.tvm.executor import *  # noqa: F403
