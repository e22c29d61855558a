"""Kernels and memory that only the CPU has."""
