"""Tables of published figures of papers, beside the simulator's predictions."""
