"""Serve config files, one per deployment shape."""
