"""The service as a whole: its speed plain and speculative, beside other engines, and what a long prompt does to streams."""
