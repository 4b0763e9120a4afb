"""Errors a person reads: one sentence that says what is wrong and what to do. Knows no Ray and no HTTP."""


class ConfigError(ValueError):
    """A deployment configuration that cannot work. Raised before any model loads."""
