"""What updates that begin before the gradient norm bring, and what steps that clip cost."""
