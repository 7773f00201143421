"""What cases return: declared work, and how to build it."""
