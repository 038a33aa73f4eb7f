"""State on its way to disk while training goes on."""
