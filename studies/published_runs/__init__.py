"""Published runs: their testbeds, and models of them."""
