"""Study of goodput (useful training per time) over the checkpoint interval, predicted and measured."""
