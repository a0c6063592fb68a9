"""Runs the model: the only folder that touches MLX."""
