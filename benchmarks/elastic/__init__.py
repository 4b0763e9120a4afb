"""Drafters that come and go under a steady load: what becomes of the speed, and whether any client notices. See __main__.py."""
