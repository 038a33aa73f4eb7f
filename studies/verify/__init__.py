"""Test of `tune verify`: it must find and name seeded defects, and leave correct runs alone."""
