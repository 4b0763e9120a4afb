"""Verifier and drafters on several GPUs. See __main__.py."""
