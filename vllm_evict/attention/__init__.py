"""Attention mass per KV block, and views of block tables without holes."""
