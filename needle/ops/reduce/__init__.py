"""Ops along axes: sums, extremes, order, softmax."""
