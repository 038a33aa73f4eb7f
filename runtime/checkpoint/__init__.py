"""The lazy asynchronous checkpoint engine."""
