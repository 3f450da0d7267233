"""The earlier path of `needle.course.tvm.mnist`."""

from needle.course.tvm.mnist import *  # noqa: F403
from needle.course.tvm.mnist import main

if __name__ == "__main__":
    raise SystemExit(main())
