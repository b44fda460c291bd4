"""The parts of a diagnosis: a run as columns, windows around an onset, and the findings of each level of suspicion."""
