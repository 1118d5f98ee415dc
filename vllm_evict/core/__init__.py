"""Decides which blocks of a request go, and when; imports neither torch nor vLLM."""
