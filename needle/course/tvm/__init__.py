"""The assignment in TVM: kernels scheduled by hand, an executor of graphs, and two labs. See needle/course/README.md."""
