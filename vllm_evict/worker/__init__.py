"""Worker side: holes into block tables, running sums of attention mass, reports."""
