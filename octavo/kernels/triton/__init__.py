"""Triton kernels of the decode and prefill path, an operation a file. Import a module only where triton is there.

Every kernel of the decode chain takes part in programmatic dependent launch (``launch.py``). ``*_reference`` functions are
the same operations in torch: the ground truth of the tests, and what runs where a kernel does not apply.
"""
