"""Cases that run over throttled links, beside what the simulator predicts."""
