"""The earlier path of `needle.course.tvm.kernels`."""

from needle.course.tvm.kernels import *  # noqa: F403
