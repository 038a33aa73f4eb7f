"""The two engines that simulate a schedule of ops on a machine: a readable one, and a fast one compiled by numba."""
