"""The CPU kernels: C sources, their build, and the loaded library."""
