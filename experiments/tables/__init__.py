"""One module for each paper: its figures beside the simulator's predictions."""
