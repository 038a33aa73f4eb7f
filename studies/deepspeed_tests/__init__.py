"""DeepSpeed's own tests, with a plan on every engine that they build."""
