"""A run of DeepSpeed's own tests with a plan of ebbtide on every engine that they build."""
