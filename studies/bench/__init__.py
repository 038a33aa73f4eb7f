"""Code shared by several studies: trials, clocks, records, comparisons of bits."""
