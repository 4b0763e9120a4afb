"""What a round takes beside what it computes. See __main__.py."""
