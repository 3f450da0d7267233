"""The earlier path of `needle.course.tvm.fashion`."""

from needle.course.tvm.fashion import *  # noqa: F403
from needle.course.tvm.fashion import main

if __name__ == "__main__":
    raise SystemExit(main())
