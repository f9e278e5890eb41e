"""The run described without arrays: numpy only, shared by all."""
