"""Random loads that search for faults, check invariants after each step, and shrink what fails to a short program."""
