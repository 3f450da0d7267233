"""What users look at a conversion with: verify, explain, the trace log, the command line."""
