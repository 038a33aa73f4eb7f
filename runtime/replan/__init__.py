"""Plans made or changed while training runs."""
