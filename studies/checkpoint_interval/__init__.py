"""Study of goodput over the checkpoint interval: killed training runs compared with the prediction."""
