"""The HTTP edge: OpenAI-compatible requests, text and streams over an engine client. Knows no Ray."""
