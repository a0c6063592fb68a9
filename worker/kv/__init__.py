"""Where the keys and values of a sequence lie: pages and reused beginnings in integers, apart from the arrays."""
