"""DeepSpeed's own tests, run with a plan on every engine that they build."""
