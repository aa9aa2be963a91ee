"""CUDA kernels in their plainest form, through numba."""
