"""Each kernel's contract, checks and torch reference, and what runs it: C++, Triton, CUDA C++."""
