"""A real server under random load and injected faults (`python tests/harness/soak --minutes 10`)."""
