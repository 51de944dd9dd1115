"""Kernels: the reference in plain torch (the specification) and the operators that reach it."""
