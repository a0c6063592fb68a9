"""The worker: one job at a time on one device."""
