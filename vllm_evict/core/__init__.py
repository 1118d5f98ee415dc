"""Decides which blocks of a request are evicted, and when. Imports neither torch nor vLLM."""
