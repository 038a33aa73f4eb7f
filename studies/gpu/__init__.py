"""A suite of checks and measurements that runs ebbtide on a machine with a GPU."""
