"""Code shared by several studies: trials, clocks, records and bitwise comparisons of tensors."""
