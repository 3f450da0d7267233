"""What course programs need and others do not. See README.md."""
