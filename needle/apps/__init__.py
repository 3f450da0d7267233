"""The course's modules by their old names; this folder may stand on a program's path, too."""
