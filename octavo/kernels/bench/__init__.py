"""Benchmarks of kernels against their references and floors; for a machine with a GPU."""
