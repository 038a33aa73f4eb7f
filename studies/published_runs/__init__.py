"""Study of published training runs: how well ebbtide predicts their times and memory."""
