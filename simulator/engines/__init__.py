"""The two engines that simulate a schedule of ops on a machine: a readable reference, and a fast one compiled
by numba.
"""
