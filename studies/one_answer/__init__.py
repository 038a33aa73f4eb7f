"""Whether one question has one answer, whoever asks it."""
