"""Element-wise ops: arithmetic, functions of real numbers, comparisons, activations."""
