"""The `mtplx` command line."""
