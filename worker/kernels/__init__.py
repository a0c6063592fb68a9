"""Kernels of the decode step: one file a computation, one text for Metal and CUDA, each with a plain reference."""
