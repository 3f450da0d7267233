"""What other systems call: the backend of torch.compile, torch.ops.needle, Relax, and torch as a fallback."""
