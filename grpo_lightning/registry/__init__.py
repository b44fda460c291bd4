"""Many runs: what differs between two, and whether what is recorded of each still holds."""
