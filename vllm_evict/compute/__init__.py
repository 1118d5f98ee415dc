"""Measures and moves on a worker: running sums, views of block tables, reports, compaction; imports no vLLM."""
