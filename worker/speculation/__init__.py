"""Drafts, and how wide the next forward is; plain Python but for drafters that are models."""
