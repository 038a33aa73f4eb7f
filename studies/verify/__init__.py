"""Test of `tune verify`, which compares training under ebbtide with stock DeepSpeed.

It must find and name defects that are put into training, and accept correct runs.
"""
