"""Test of `tune verify`, which compares training under ebbtide with stock DeepSpeed.

`tune verify` must find and name defects that are put into training, and accept correct runs.
"""
