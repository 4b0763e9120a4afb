"""Errors a person reads: one sentence that says what is wrong and what to do. Knows no Ray and no HTTP."""


class ConfigError(ValueError):
    """A deployment configuration that cannot work. Raised before any model loads."""


class GrammarError(ValueError):
    """A grammar that makes no sense to llguidance, or is too much for it. Before the first token the API answers 400."""


class NotReady(RuntimeError):
    """Who is to serve a request is starting, leaving or gone. The API answers 503."""
