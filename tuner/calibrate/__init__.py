"""The correction of a machine's bandwidths and compute speeds by measured training runs.

The package also estimates how uncertain a predicted time is, as an interval that holds nine runs in ten.
"""
