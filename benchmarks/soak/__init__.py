"""A service under mixed load for a long time: does anything grow, leak or fail? See __main__.py."""
