"""One module a paper: its figures beside what the simulator predicts."""
