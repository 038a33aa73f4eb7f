"""What several studies share: trials, clocks, records, comparisons of bits."""
