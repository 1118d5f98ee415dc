"""The worker's side: running sums, views of block tables, reports, compaction, rotation. Imports no vLLM."""
