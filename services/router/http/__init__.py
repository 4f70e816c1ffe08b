"""The OpenAI-compatible HTTP face of the router: requests in, the same Generation, answers out."""
