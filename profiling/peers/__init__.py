"""What `bench.py` compares: the models and their file formats, the table of peers, and the processes that run them.

Imports no torch and no peer: each is imported only in the process that needs it.
"""
