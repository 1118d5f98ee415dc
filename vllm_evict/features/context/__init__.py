"""Requests longer than the model's context: keys of what they keep are rotated to later positions."""
