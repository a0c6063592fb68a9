"""Heads for models that have none: the model writes its own text, and a head learns to guess it."""
