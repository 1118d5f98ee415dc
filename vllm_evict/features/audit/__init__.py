"""Audits: full attention scores answers again, to measure what eviction changed."""
