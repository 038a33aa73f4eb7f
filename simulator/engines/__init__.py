"""The engines that simulate a schedule on a machine: a readable reference, and one compiled by numba."""
