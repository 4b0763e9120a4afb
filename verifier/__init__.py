"""The target: paged KV pool, batch layout, sampling, backends. Knows kernels, nothing of drafters, Ray or HTTP."""
