"""Heads that guess the token after the next one from a model's own hidden state (multi-token prediction, MTP)."""
