"""Kernels for NVIDIA Hopper, written in Pallas for Mosaic GPU."""
