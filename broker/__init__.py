"""The broker: who waits, who runs, who is told what. Never imports mlx."""
