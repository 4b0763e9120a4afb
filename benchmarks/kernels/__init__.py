"""Times every CUDA kernel beside its peers, all in one run: `python -m benchmarks.kernels --help`."""
