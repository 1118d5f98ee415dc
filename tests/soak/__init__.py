"""A real server under random load and injected faults (`python tests/soak --minutes 10`)."""
