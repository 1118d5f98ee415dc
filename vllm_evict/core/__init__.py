"""Engine-core side: which blocks go, when, and back to which pool. No torch on the hot path."""
